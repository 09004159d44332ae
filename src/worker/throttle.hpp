// Throttle: a share of the processor as a limit for the whole process, and the notice that the
// process was asleep.
//
// Used by Worker (after each request), the fetching thread (after each piece) and the agent.
// CpuBudget and SleepWatch are rules: clocks go in as arguments. The budget is a bucket of
// processor time: filled with `share` of a core per second, never more than `window` worth of it,
// emptied by what all threads of the process used (CLOCK_PROCESS_CPUTIME_ID). Whoever used it up
// pauses until it is even, so that over a few windows the process stays at its share; an answer is
// delayed by what it cost, never by a lump of many answers, so a backbone sees a slower worker and
// not one that stalls.
// Thread: rules are values; Throttle's functions from any thread, stop() also from a signal
// handler's thread. Owns: nothing. Limits: one pause is at most kPauseMax, the rest stays owed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace kvasir::worker {

// Time since boot, suspended time included: what a phone's sleep does not stop.
std::chrono::nanoseconds boot_time();
// Processor time of all threads of this process.
std::chrono::nanoseconds process_cpu_time();

class CpuBudget {
public:
    // `share` of one core's time: 0.3, or 1.2 for 30 % of four threads.
    CpuBudget(double share, std::chrono::nanoseconds window) : share_(share), window_(window) {}

    // How long to pause now; zero while there is time left.
    std::chrono::nanoseconds settle(std::chrono::nanoseconds now, std::chrono::nanoseconds cpu);

private:
    // Constant after construction.
    const double share_;
    const std::chrono::nanoseconds window_;
    // State.
    bool has_begun_ = false;
    std::chrono::nanoseconds now_{0};
    std::chrono::nanoseconds cpu_{0};
    double credit_ns_ = 0;
};

// Time that passed though nobody waited and nobody computed: the process was stopped, or the whole
// machine.
class SleepWatch {
public:
    explicit SleepWatch(std::chrono::nanoseconds gap_max) : gap_max_(gap_max) {}

    // `waited`: how long the caller was ready to wait since the last call. True when more than
    // gap_max is unexplained since then.
    bool check(std::chrono::nanoseconds now, std::chrono::nanoseconds cpu,
               std::chrono::nanoseconds waited);

private:
    std::chrono::nanoseconds gap_max_;
    bool has_begun_ = false;
    std::chrono::nanoseconds now_{0};
    std::chrono::nanoseconds cpu_{0};
};

class Throttle {
public:
    static constexpr std::chrono::milliseconds kWindow{100};
    static constexpr std::chrono::seconds kPauseMax{2};

    // `percent` of `threads` cores, 1 to 100.
    Throttle(unsigned percent, unsigned threads) : budget_(percent / 100.0 * threads, kWindow) {}

    // Pauses the caller until the process is within its share again, or stop().
    void pause();
    void stop();

private:
    // Guarded by mu_.
    std::mutex mu_;
    std::condition_variable wake_;
    CpuBudget budget_;
    bool stopped_ = false;
};

}  // namespace kvasir::worker
