// The end-to-end tests' main: as gtest's own, but for the exit code 77 when every test that was to
// run was skipped, which ctest shows as "Skipped".
#include <gtest/gtest.h>

int main(int argc, char** argv) {
    ::testing::InitGoogleTest(&argc, argv);
    if (const int failed = RUN_ALL_TESTS(); failed != 0) return failed;
    const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
    const bool is_skipped =
        all.skipped_test_count() > 0 && all.skipped_test_count() == all.test_to_run_count();
    return is_skipped ? 77 : 0;
}
