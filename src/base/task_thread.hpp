// One thread with a bounded queue of tasks, run in order: the owner of something that blocks.
//
// Used by store (the database) and the coordinator (rules; file reads). Thread: post() and call()
// from any but its own thread, where call() would wait for itself (KVASIR_CHECK). Owns: the thread;
// destruction runs what is queued, then joins. Limits: tasks_max queued tasks, more are kBusy.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "base/result.hpp"

namespace kvasir {

class TaskThread {
public:
    // `name` is what errors call it: "NAME is busy".
    TaskThread(std::string name, size_t tasks_max);
    ~TaskThread();
    TaskThread(const TaskThread&) = delete;
    TaskThread& operator=(const TaskThread&) = delete;

    // Errors: kBusy (queue full), kClosed.
    Status post(std::function<void()> task);
    // Runs `task` there and waits for it. Errors: those of post(); then the task was not run.
    Status call(const std::function<void()>& task);
    // Nothing new is taken; what is queued is run; joins. May be called more than once.
    void close();

private:
    void run();

    // Constant after construction.
    const std::string name_;
    const size_t tasks_max_;
    // Guarded by mu_.
    std::mutex mu_;
    std::condition_variable wake_;
    std::deque<std::function<void()>> tasks_;
    bool is_closed_ = false;
    std::thread thread_;
};

}  // namespace kvasir
