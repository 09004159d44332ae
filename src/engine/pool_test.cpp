#include "engine/pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

namespace kvasir::engine {
namespace {

TEST(Pool, RunsEveryTaskOnceInManyGenerations) {
    for (uint32_t threads : {1u, 2u, 3u, 4u, 5u, 16u}) {
        Pool pool(threads);
        EXPECT_EQ(pool.threads(), threads);
        uint64_t generations = 0;
        for (uint32_t round = 0; round < 400; ++round) {
            const uint32_t count = round % 23;   // none, one, fewer than threads, more
            std::vector<uint32_t> times(count);  // each task has its own
            pool.run(count, [&](uint32_t i) { ++times[i]; });
            ASSERT_TRUE(std::all_of(times.begin(), times.end(), [](uint32_t n) { return n == 1; }))
                << threads << " threads, round " << round;
            ++generations;
        }
        EXPECT_EQ(generations, 400u);
    }
}

// What run() promises to those who wait for an earlier task.
TEST(Pool, ATaskMayWaitForOneWithALowerNumber) {
    Pool pool(4);
    for (uint32_t round = 0; round < 200; ++round) {
        constexpr uint32_t kTasks = 16;
        std::atomic<uint32_t> done[kTasks] = {};
        pool.run(kTasks, [&](uint32_t i) {
            if (i > 0) done[i - 1].wait(0);
            done[i].store(1);
            done[i].notify_all();
        });
        ASSERT_EQ(done[kTasks - 1].load(), 1u);
    }
}

// Tasks that wait for each other need as many threads as there are.
TEST(Pool, AllThreadsTakePart) {
    constexpr uint32_t kThreads = 16;
    Pool pool(kThreads);
    std::atomic<uint32_t> here{0};
    std::vector<std::thread::id> who(kThreads);
    pool.run(kThreads, [&](uint32_t i) {
        who[i] = std::this_thread::get_id();
        here.fetch_add(1);
        here.notify_all();
        for (uint32_t n = here.load(); n < kThreads; n = here.load()) here.wait(n);
    });
    EXPECT_EQ(std::set<std::thread::id>(who.begin(), who.end()).size(), size_t{kThreads});
}

TEST(Pool, MayEndAtOnce) {
    for (uint32_t round = 0; round < 200; ++round) Pool(1 + round % 8);
    for (uint32_t round = 0; round < 200; ++round) {
        std::atomic<uint32_t> sum{0};
        Pool pool(1 + round % 8);
        pool.run(3, [&](uint32_t i) { sum.fetch_add(i + 1); });
        ASSERT_EQ(sum.load(), 6u);
    }
}

}  // namespace
}  // namespace kvasir::engine
