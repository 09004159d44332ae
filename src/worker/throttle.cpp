#include "worker/throttle.hpp"

#include <algorithm>

#include <time.h>

namespace kvasir::worker {
namespace {

std::chrono::nanoseconds read_clock(clockid_t clock) {
    timespec time = {};
    ::clock_gettime(clock, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

std::chrono::nanoseconds boot_time() {
    return read_clock(CLOCK_BOOTTIME);
}

std::chrono::nanoseconds process_cpu_time() {
    return read_clock(CLOCK_PROCESS_CPUTIME_ID);
}

std::chrono::nanoseconds CpuBudget::settle(std::chrono::nanoseconds now,
                                           std::chrono::nanoseconds cpu) {
    const double full = share_ * static_cast<double>(window_.count());
    if (!has_begun_) {
        has_begun_ = true;
        credit_ns_ = full;
    } else {
        // Clocks of the kernel do not run backwards; a test's may not either.
        const auto passed = std::max(now - now_, std::chrono::nanoseconds(0));
        const auto used = std::max(cpu - cpu_, std::chrono::nanoseconds(0));
        // What was used is taken before the bucket is capped: a long request is paid by the time
        // that it took itself, as far as that goes.
        credit_ns_ +=
            share_ * static_cast<double>(passed.count()) - static_cast<double>(used.count());
        credit_ns_ = std::min(credit_ns_, full);
    }
    now_ = now;
    cpu_ = cpu;
    if (credit_ns_ >= 0) return std::chrono::nanoseconds(0);
    return std::chrono::nanoseconds(static_cast<int64_t>(-credit_ns_ / share_));
}

bool SleepWatch::check(std::chrono::nanoseconds now, std::chrono::nanoseconds cpu,
                       std::chrono::nanoseconds waited) {
    const auto unexplained = (now - now_) - (cpu - cpu_) - waited;
    const bool slept = has_begun_ && unexplained > gap_max_;
    has_begun_ = true;
    now_ = now;
    cpu_ = cpu;
    return slept;
}

void Throttle::pause() {
    std::unique_lock lock(mu_);
    const auto pause = std::min<std::chrono::nanoseconds>(
        budget_.settle(boot_time(), process_cpu_time()), kPauseMax);
    if (pause.count() > 0) wake_.wait_for(lock, pause, [this] { return stopped_; });
}

void Throttle::stop() {
    const std::lock_guard lock(mu_);
    stopped_ = true;
    wake_.notify_all();
}

}  // namespace kvasir::worker
