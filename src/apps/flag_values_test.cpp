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

TEST(FlagValues, SizesAreParsed) {
    EXPECT_EQ(*parse_size("12000000"), 12000000u);
    EXPECT_EQ(*parse_size("1"), 1u);
    EXPECT_EQ(*parse_size("9007199254740993"), 9007199254740992u);  // a double has 53 bits
    EXPECT_EQ(*parse_size("340M"), 340000000u);
    EXPECT_EQ(*parse_size("340 mb"), 340000000u);
    EXPECT_EQ(*parse_size("1.5G"), 1500000000u);
    EXPECT_EQ(*parse_size(" 0.5k "), 500u);
    EXPECT_EQ(*parse_size("2Ki"), 2048u);
    EXPECT_EQ(*parse_size("512MiB"), uint64_t{512} << 20);
    EXPECT_EQ(*parse_size("1.5Gi"), uint64_t{3} << 29);
    EXPECT_EQ(*parse_size("4T"), 4000000000000u);
    for (const char* text : {"",
                             " ",
                             "M",
                             "0",
                             "0.2",
                             "-5",
                             "+5",
                             "0x10",
                             "1e9",
                             "5X",
                             "5MM",
                             "5iM",
                             "5Kii",
                             "nan",
                             "inf",
                             "1,5G",
                             "5 M B",
                             "1153000000000000000000",
                             "18446744073709551615",
                             "99999999T"}) {
        const auto size = parse_size(text);
        ASSERT_FALSE(size) << text << " gives " << *size;
        EXPECT_EQ(size.error().code, Errc::kUsage);
    }
}

}  // namespace
}  // namespace kvasir::apps
