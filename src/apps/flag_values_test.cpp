#include "apps/flag_values.hpp"

#include <gtest/gtest.h>

namespace kvasir::apps {
namespace {

TEST(FlagValues, TokensAreParsed) {
    EXPECT_EQ(*parse_tokens("3,5,7"), (std::vector<int32_t>{3, 5, 7}));
    EXPECT_EQ(*parse_tokens(" 3 , 5"), (std::vector<int32_t>{3, 5}));
    EXPECT_EQ(*parse_tokens("-1,2147483647"), (std::vector<int32_t>{-1, 2147483647}));
}

TEST(FlagValues, BadTokensAreUsageErrorsThatNameTheItem) {
    for (const char* text : {"", ",", "3,", ",3", "3,,5", "x", "3,5x", "3;5", "2147483648", "3 5",
                             "0x3", "1.5", "+3"}) {
        const auto tokens = parse_tokens(text);
        ASSERT_FALSE(tokens) << text;
        EXPECT_EQ(tokens.error().code, Errc::kUsage);
        EXPECT_NE(tokens.error().detail.find("item "), std::string::npos);
    }
    EXPECT_NE(parse_tokens("3,5,\x1b[31m").error().detail.find("item 3"), std::string::npos);
    EXPECT_EQ(parse_tokens("\x1b[31m").error().detail.find('\x1b'), std::string::npos);
}

TEST(FlagValues, SharesAreParsed) {
    EXPECT_DOUBLE_EQ(*parse_share("100%"), 1.0);
    EXPECT_DOUBLE_EQ(*parse_share("100"), 1.0);
    EXPECT_DOUBLE_EQ(*parse_share("62.5%"), 0.625);
    EXPECT_DOUBLE_EQ(*parse_share("0"), 0.0);
    for (const char* text : {"", "%", "101", "-1", "nan", "inf", "50%%", "half", "50 %x"}) {
        const auto share = parse_share(text);
        ASSERT_FALSE(share) << text;
        EXPECT_EQ(share.error().code, Errc::kUsage);
    }
}

}  // namespace
}  // namespace kvasir::apps
