#include "crypto/mac.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string_view>
#include <vector>

namespace kvasir::crypto {
namespace {

std::span<const uint8_t> bytes(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

TEST(Mac, IsTheOneOfRfc4231) {
    const std::vector<uint8_t> key(20, 0x0b);
    EXPECT_EQ(to_hex(hmac_sha256(key, bytes("Hi There"))),
              "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    EXPECT_EQ(to_hex(hmac_sha256(bytes("Jefe"), bytes("what do ya want for nothing?"))),
              "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST(Mac, ComparesWholeTexts) {
    EXPECT_TRUE(equal_constant_time(bytes("abc"), bytes("abc")));
    EXPECT_TRUE(equal_constant_time({}, {}));
    EXPECT_FALSE(equal_constant_time(bytes("abc"), bytes("abd")));
    EXPECT_FALSE(equal_constant_time(bytes("abc"), bytes("ab")));
}

TEST(Mac, RandomBytesDiffer) {
    std::array<uint8_t, 32> a = {}, b = {};
    fill_random(a);
    fill_random(b);
    EXPECT_NE(a, b);
    EXPECT_NE(a, (std::array<uint8_t, 32>{}));
}

}  // namespace
}  // namespace kvasir::crypto
