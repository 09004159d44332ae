#include "apps/threads_flag.hpp"

#include <gtest/gtest.h>

namespace kvasir::apps {
namespace {

TEST(ThreadsFlag, TakesWhatAMachineCanUse) {
    for (const char* text : {"1", "64"}) EXPECT_EQ(refuse_threads(text, 1), "") << text;
    EXPECT_EQ(refuse_threads("256", 64), "");
    EXPECT_EQ(refuse_threads("words", 1), "") << "CLI11 says what is wrong with it";
    for (const char* text : {"0", "-1", "65", "512", "4294967297"}) {
        EXPECT_NE(refuse_threads(text, 2), "") << text;
    }
    EXPECT_EQ(refuse_threads("512", 2),
              "512 threads are more than the 64 that are taken on this machine, which runs 2 at "
              "once: more would only wait for each other");
    EXPECT_NE(refuse_threads("257", 64), "");
}

}  // namespace
}  // namespace kvasir::apps
