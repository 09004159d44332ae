#include "base/task_thread.hpp"

#include <utility>

#include "base/check.hpp"

namespace kvasir {

TaskThread::TaskThread(std::string name, size_t tasks_max)
    : name_(std::move(name)), tasks_max_(tasks_max), thread_([this] { run(); }) {}

TaskThread::~TaskThread() {
    close();
}

Status TaskThread::post(std::function<void()> task) {
    {
        const std::lock_guard lock(mu_);
        if (is_closed_) return fail(Errc::kClosed, name_ + " is closed");
        if (tasks_.size() >= tasks_max_) {
            return fail(Errc::kBusy, name_ + " is busy: " + std::to_string(tasks_max_) +
                                         " requests are waiting; try again later");
        }
        tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
    return {};
}

Status TaskThread::call(const std::function<void()>& task) {
    KVASIR_CHECK(std::this_thread::get_id() != thread_.get_id());
    std::mutex done_mu;
    std::condition_variable done;
    bool is_done = false;
    Status ok = post([&] {
        task();
        // Notified under the lock: the caller owns the condition and may be gone right after.
        const std::lock_guard lock(done_mu);
        is_done = true;
        done.notify_one();
    });
    if (!ok) return ok;
    std::unique_lock lock(done_mu);
    done.wait(lock, [&] { return is_done; });
    return {};
}

void TaskThread::close() {
    {
        const std::lock_guard lock(mu_);
        is_closed_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
}

void TaskThread::run() {
    for (;;) {
        std::function<void()> task;
        {
            std::unique_lock lock(mu_);
            wake_.wait(lock, [&] { return is_closed_ || !tasks_.empty(); });
            if (tasks_.empty()) return;
            task = std::move(tasks_.front());
            tasks_.pop_front();
        }
        task();
    }
}

}  // namespace kvasir
