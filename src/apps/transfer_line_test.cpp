// What a person reads of a download: share, rate, time left.
#include "apps/transfer_line.hpp"

#include <gtest/gtest.h>

namespace kvasir::apps {
namespace {

using namespace std::chrono_literals;

TEST(TransferRate, FollowsTheLineAndTellsTheTimeLeft) {
    TransferRate rate;
    EXPECT_EQ(rate.bytes_per_second(), 0);
    EXPECT_FALSE(rate.left(0, 100));
    // 100 MB that were there at the beginning are no speed.
    for (int i = 0; i <= 100; ++i)
        rate.add(1000ms + i * 100ms, 100'000'000 + uint64_t(i) * 100'000);
    EXPECT_NEAR(rate.bytes_per_second(), 1e6, 1e3);
    ASSERT_TRUE(rate.left(110'000'000, 170'000'000));
    EXPECT_EQ(*rate.left(110'000'000, 170'000'000), 60s);
    // A line that becomes faster is believed within a few seconds.
    for (int i = 1; i <= 30; ++i)
        rate.add(11000ms + i * 200ms, 110'000'000 + uint64_t(i) * 2'000'000);
    EXPECT_NEAR(rate.bytes_per_second(), 1e7, 2e5);
}

TEST(TransferRate, ANewTransferBeginsAnew) {
    TransferRate rate;
    rate.add(0ms, 0);
    rate.add(1000ms, 1'000'000);
    EXPECT_GT(rate.bytes_per_second(), 0);
    rate.add(2000ms, 10);
    EXPECT_EQ(rate.bytes_per_second(), 0);
    EXPECT_FALSE(rate.left(10, 1'000'000));
}

TEST(TransferText, HasBarShareRateAndTime) {
    TransferRate rate;
    EXPECT_EQ(transfer_text(0, 0, rate, false), "100 %  0 B of 0 B");
    rate.add(0ms, 0);
    rate.add(1000ms, 34'000'000);
    EXPECT_EQ(transfer_text(170'000'000, 340'000'000, rate, true),
              "[##########..........] 50 %  170 MB of 340 MB  34.0 MB/s  0:05 left");
    EXPECT_EQ(transfer_text(170'000'000, 340'000'000, rate, false),
              "50 %  170 MB of 340 MB  34.0 MB/s  0:05 left");
}

}  // namespace
}  // namespace kvasir::apps
