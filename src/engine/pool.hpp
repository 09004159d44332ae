// A pool of compute threads that sleep between calls.
//
// Used by KernelRunner. run() hands out task numbers in order to the caller and the pool's threads;
// a task may therefore wait for one with a lower number, which some thread has in hand.
//
// Thread: run() from one thread at a time. Owns: threads - 1 threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace kvasir::engine {

class Pool {
public:
    explicit Pool(uint32_t threads);
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool();

    uint32_t threads() const { return static_cast<uint32_t>(threads_.size()) + 1; }

    // Calls task(n) once for each n below `count`, and returns when all calls have. No task may
    // throw.
    void run(uint32_t count, const std::function<void(uint32_t)>& task);

private:
    void serve();
    void take_tasks();

    // Of the current call: written before generation_ is raised.
    const std::function<void(uint32_t)>* task_ = nullptr;
    uint32_t count_ = 0;

    std::atomic<uint32_t> generation_{0};
    std::atomic<uint32_t> next_{0};
    std::atomic<uint32_t> busy_{0};  // pool threads that have not finished the current call
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
};

}  // namespace kvasir::engine
