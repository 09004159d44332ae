// The processor limit and the notice of sleep: as rules in virtual time, and for the real process.
#include "worker/throttle.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

namespace kvasir::worker {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;

TEST(CpuBudget, AnyMixOfRequestsStaysAtItsShareOverAnySecond) {
    std::mt19937 random(1);
    for (const double share : {0.01, 0.3, 0.9, 1.2}) {
        for (const int request_ms : {1, 20, 90}) {
            CpuBudget budget(share, 100ms);
            nanoseconds now{0}, cpu{0};
            (void)budget.settle(now, cpu);
            const nanoseconds start = now;
            while (now < 60s) {
                // A request keeps one or two threads busy.
                const auto used = std::chrono::milliseconds(1 + random() % request_ms);
                const int threads = share > 1 ? 2 : 1;
                now += used;
                cpu += used * threads;
                const nanoseconds pause = budget.settle(now, cpu);
                now += pause;
                // Right after a pause it is even: at most a window ahead of the share.
                const double most = share * static_cast<double>((now - start + 100ms).count());
                ASSERT_LE(static_cast<double>(cpu.count()), most + 1);
            }
            EXPECT_NEAR(static_cast<double>(cpu.count()) / static_cast<double>(now.count()), share,
                        share * 0.03);
        }
    }
}

TEST(CpuBudget, AnIdleTimeIsNotSavedUp) {
    CpuBudget budget(0.5, 100ms);
    (void)budget.settle(0s, 0s);
    EXPECT_EQ(budget.settle(1h, 0s), 0ns);
    // 50 ms of credit at most: of 100 ms, used in 100 ms, exactly the share is left to pay.
    EXPECT_EQ(budget.settle(1h + 100ms, 100ms), 0ns);
    EXPECT_EQ(budget.settle(1h + 200ms, 200ms), 100ms);
}

TEST(CpuBudget, ALightLoadIsNeverPaused) {
    CpuBudget budget(0.3, 100ms);
    nanoseconds now{0}, cpu{0};
    for (int i = 0; i < 1000; ++i) {
        EXPECT_EQ(budget.settle(now, cpu), 0ns);
        now += 10ms;
        cpu += 2ms;
    }
}

TEST(SleepWatch, SeesSleepAndNothingElse) {
    SleepWatch watch(8s);
    EXPECT_FALSE(watch.check(5s, 1s, 0s)) << "the first time there is nothing to compare";
    EXPECT_FALSE(watch.check(25s, 1s, 20s)) << "waited";
    EXPECT_FALSE(watch.check(55s, 31s, 0s)) << "computed";
    EXPECT_FALSE(watch.check(57s, 31s, 0s)) << "a short stop";
    EXPECT_TRUE(watch.check(57s + 9s, 31s, 0s)) << "stopped between two requests";
    EXPECT_TRUE(watch.check(66s + 700s, 31s, 8s)) << "stopped while it waited";
    EXPECT_FALSE(watch.check(767s, 31s, 1s)) << "told once";
}

// Two threads that never rest, one of them as if it fetched: what the process used of one core.
double share_used(Throttle& throttle, nanoseconds time) {
    const auto before = boot_time();
    const auto cpu_before = process_cpu_time();
    const auto work = [&] {
        uint64_t sum = 1;
        while (boot_time() < before + time) {
            const auto burst_end = process_cpu_time() + 3ms;
            while (process_cpu_time() < burst_end) {
                for (int i = 0; i < 1000; ++i) sum = sum * 6364136223846793005u + 1;
            }
            throttle.pause();
        }
        return sum;
    };
    std::atomic<uint64_t> sink{0};
    std::thread other([&] { sink += work(); });
    sink += work();
    other.join();
    return static_cast<double>((process_cpu_time() - cpu_before).count()) /
           static_cast<double>((boot_time() - before).count());
}

// The whole process, all threads, at 30 % of one core. On a machine that is full with others' work
// it may get less, never more.
TEST(Throttle, ABusyProcessStaysAtThirtyPerCent) {
    double share = 0;
    for (int i = 0; i < 5 && share < 0.25; ++i) {
        Throttle throttle(30, 1);
        throttle.pause();
        share = share_used(throttle, 3s);
        EXPECT_LE(share, 0.35);
    }
    EXPECT_GE(share, 0.25);
}

TEST(Throttle, StopEndsAPause) {
    Throttle throttle(1, 1);
    throttle.pause();
    const auto burst_end = process_cpu_time() + 60ms;  // six seconds' worth
    while (process_cpu_time() < burst_end) {
    }
    const auto before = boot_time();
    std::thread stopper([&] { throttle.stop(); });
    for (int i = 0; i < 10; ++i) throttle.pause();
    stopper.join();
    EXPECT_LT(boot_time() - before, 5s);
}

}  // namespace
}  // namespace kvasir::worker
