#include "apps/logits_difference.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace kvasir::apps {
namespace {

using Rows = std::vector<std::vector<float>>;

TEST(LogitsDifference, NumbersOfASmallCase) {
    const float ln3 = std::log(3.0F);
    const Rows run = {{0, 0}, {0, ln3}};  // probabilities 1/2 1/2 and 1/4 3/4
    const Rows reference = {{0.5F, 0}, {0, ln3}};
    const std::vector<int32_t> tokens = {0, 1};
    const auto got = compare_logits(run, reference, tokens);
    ASSERT_TRUE(got);
    EXPECT_EQ(got->rows, 2u);
    EXPECT_DOUBLE_EQ(got->max_abs, 0.5);
    EXPECT_DOUBLE_EQ(got->mean_abs, 0.125);
    EXPECT_EQ(got->other_likeliest, 0u) << "the lowest id among equals";
    EXPECT_NEAR(got->perplexity, std::sqrt(2 * 4.0 / 3), 1e-6);
    EXPECT_LT(got->perplexity_reference, got->perplexity);

    const auto other = compare_logits(Rows{{0, 1}}, Rows{{1, 0}}, std::vector<int32_t>{0});
    ASSERT_TRUE(other);
    EXPECT_EQ(other->other_likeliest, 1u);
}

TEST(LogitsDifference, OtherWorkIsAnError) {
    const std::vector<int32_t> one = {0};
    EXPECT_FALSE(compare_logits({}, {}, {}));
    EXPECT_FALSE(compare_logits(Rows{{0}}, Rows{{0}, {0}}, one));
    EXPECT_FALSE(compare_logits(Rows{{0}}, Rows{{0, 1}}, one));
    EXPECT_FALSE(compare_logits(Rows{{0}}, Rows{{0}}, std::vector<int32_t>{1}));
    EXPECT_FALSE(compare_logits(Rows{{0}}, Rows{{0}}, std::vector<int32_t>{-1}));
}

}  // namespace
}  // namespace kvasir::apps
