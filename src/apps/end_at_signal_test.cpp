#include "apps/end_at_signal.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <semaphore>

namespace kvasir::apps {
namespace {

using ::testing::ExitedWithCode;
using ::testing::KilledBySignal;

// A program whose main thread never looks.
[[noreturn]] void busy() {
    for (;;) ::pause();
}

TEST(EndAtSignalDeathTest, EndsABusyProgramWithItsLastWords) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto ends = [](int signal) {
        auto end = EndAtSignal::make();
        (*end)->say_first([](int got) { return 40 + got; });
        ::kill(::getpid(), signal);
        busy();
    };
    EXPECT_EXIT(ends(SIGTERM), ExitedWithCode(40 + SIGTERM), "");
    EXPECT_EXIT(ends(SIGINT), ExitedWithCode(40 + SIGINT), "");
}

TEST(EndAtSignalDeathTest, WithoutWordsTheEndIsZero) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
            const auto end = EndAtSignal::make();
            ::kill(::getpid(), SIGTERM);
            busy();
        },
        ExitedWithCode(0), "");
}

TEST(EndAtSignalDeathTest, TheSecondSignalEndsAtOnce) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
            auto end = EndAtSignal::make();
            (*end)->say_first([](int) -> int {
                ::kill(::getpid(), SIGINT);
                busy();
            });
            ::kill(::getpid(), SIGTERM);
            busy();
        },
        KilledBySignal(SIGINT), "");
}

TEST(EndAtSignalDeathTest, AfterwardsSignalsAreTheMainThreadsAgain) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
            EndAtSignal::make()->reset();
            ::kill(::getpid(), SIGTERM);
            busy();
        },
        KilledBySignal(SIGTERM), "");
}

// The destructor waits for the end that has begun, and the exit code is the last words'.
TEST(EndAtSignalDeathTest, AnEndThatHasBegunIsWaitedFor) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
            std::binary_semaphore begun(0);
            {
                auto end = EndAtSignal::make();
                (*end)->say_first([&begun](int) {
                    begun.release();
                    return 9;
                });
                ::kill(::getpid(), SIGTERM);
                begun.acquire();
            }
            ::_exit(1);
        },
        ExitedWithCode(9), "");
}

}  // namespace
}  // namespace kvasir::apps
