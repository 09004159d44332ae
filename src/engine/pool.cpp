#include "engine/pool.hpp"

#include "base/check.hpp"

namespace kvasir::engine {

Pool::Pool(uint32_t threads) {
    KVASIR_CHECK(threads >= 1);
    threads_.reserve(threads - 1);
    for (uint32_t i = 1; i < threads; ++i) threads_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
    stop_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Pool::run(uint32_t count, const std::function<void(uint32_t)>& task) {
    if (threads_.empty() || count <= 1) {
        for (uint32_t i = 0; i < count; ++i) task(i);
        return;
    }
    task_ = &task;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    take_tasks();
    for (uint32_t left = busy_.load(std::memory_order_acquire); left != 0;
         left = busy_.load(std::memory_order_acquire)) {
        busy_.wait(left, std::memory_order_acquire);
    }
}

void Pool::take_tasks() {
    for (;;) {
        const uint32_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= count_) return;
        (*task_)(i);
    }
}

void Pool::serve() {
    // Threads start before the first call, so the first generation that they can miss is none.
    uint32_t seen = 0;
    for (;;) {
        generation_.wait(seen, std::memory_order_acquire);
        ++seen;
        if (stop_.load()) return;
        take_tasks();
        if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
    }
}

}  // namespace kvasir::engine
