#include "base/task_thread.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <vector>

namespace kvasir {
namespace {

TEST(TaskThread, RunsInOrderAndCallWaits) {
    TaskThread thread("test", 100);
    std::vector<int> order;
    for (int i = 0; i < 50; ++i) {
        ASSERT_TRUE(thread.post([&order, i] { order.push_back(i); }));
    }
    ASSERT_TRUE(thread.call([&] { order.push_back(50); }));
    ASSERT_EQ(order.size(), 51U);
    for (int i = 0; i < 51; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(TaskThread, AFullQueueIsBusy) {
    TaskThread thread("the test", 2);
    std::promise<void> open, started;
    ASSERT_TRUE(thread.post([&] {
        started.set_value();
        open.get_future().wait();
    }));
    started.get_future().wait();
    ASSERT_TRUE(thread.post([] {}));
    ASSERT_TRUE(thread.post([] {}));
    const Status full = thread.post([] {});
    ASSERT_FALSE(full);
    EXPECT_EQ(full.error().code, Errc::kBusy);
    EXPECT_NE(full.error().detail.find("the test"), std::string::npos);
    open.set_value();
    thread.close();
}

TEST(TaskThread, ClosingRunsWhatIsQueuedAndTakesNothingNew) {
    std::atomic<int> count{0};
    TaskThread thread("test", 1000);
    for (int i = 0; i < 500; ++i) ASSERT_TRUE(thread.post([&] { ++count; }));
    thread.close();
    EXPECT_EQ(count, 500);
    EXPECT_EQ(thread.post([] {}).error().code, Errc::kClosed);
    EXPECT_EQ(thread.call([] {}).error().code, Errc::kClosed);
}

TEST(TaskThread, ManyCallers) {
    TaskThread thread("test", 1000);
    int value = 0;  // only that thread touches it
    std::vector<std::thread> callers;
    for (int i = 0; i < 8; ++i) {
        callers.emplace_back([&] {
            for (int j = 0; j < 200; ++j) ASSERT_TRUE(thread.call([&] { ++value; }));
        });
    }
    for (auto& caller : callers) caller.join();
    EXPECT_EQ(value, 1600);
}

}  // namespace
}  // namespace kvasir
