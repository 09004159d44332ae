#include "crypto/keys.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "base/encoding.hpp"

namespace kvasir::crypto {
namespace {

std::span<const uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::array<uint8_t, 32> seed_of(uint8_t fill) {
    std::array<uint8_t, 32> seed;
    seed.fill(fill);
    return seed;
}

KeyPair made(uint8_t fill) {
    return KeyPair::from_seed(seed_of(fill)).value();
}

// The first vector of RFC 8032 section 7.1 for the key; the signature is from another
// implementation of the statement's form.
TEST(Keys, KnownAnswers) {
    std::array<uint8_t, 32> seed;
    std::ranges::copy(
        *decode_hex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"),
        seed.begin());
    const KeyPair pair = KeyPair::from_seed(seed).value();
    EXPECT_EQ(to_hex(pair.public_key()),
              "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
    const Signature signature = pair.sign("test", bytes_of("abc"));
    EXPECT_EQ(encode_hex(signature),
              "b8a294f5f97ca1a45aad69bed2fb9cc4a4644023096efcc404a01d427fb106d9"
              "91b0a6eb95994ab8783589324bd85fb151dc5c60b5757f1ba4e0b0cb9a109201");
    EXPECT_TRUE(verify(pair.public_key(), "test", bytes_of("abc"), signature));
}

TEST(Keys, EveryGeneratedKeyIsNew) {
    const KeyPair first = KeyPair::generate().value();
    const KeyPair second = KeyPair::generate().value();
    EXPECT_NE(first.public_key(), second.public_key());
    EXPECT_TRUE(verify(first.public_key(), "", {}, first.sign("", {})));
    EXPECT_FALSE(verify(second.public_key(), "", {}, first.sign("", {})));
}

RC_GTEST_PROP(KeysProperty, SignedIsVerifiedUnderItsContextOnly,
              (const std::vector<uint8_t>& message, const std::string& text, uint8_t fill)) {
    const KeyPair pair = made(fill);
    const std::string context = text.substr(0, 255);
    const Signature signature = pair.sign(context, message);
    RC_ASSERT(verify(pair.public_key(), context, message, signature));
    RC_ASSERT(
        !verify(made(static_cast<uint8_t>(fill + 1)).public_key(), context, message, signature));
    RC_ASSERT(!verify(pair.public_key(), context.substr(0, 254) + "x", message, signature));
    std::vector<uint8_t> longer = message;
    longer.push_back(0);
    RC_ASSERT(!verify(pair.public_key(), context, longer, signature));
    // A byte that moves from the message into the context is another statement.
    if (!message.empty() && context.size() < 255) {
        const std::string moved = context + static_cast<char>(message.front());
        RC_ASSERT(!verify(pair.public_key(), moved, std::span(message).subspan(1), signature));
    }
}

TEST(Keys, EveryFlippedBitIsRefused) {
    const KeyPair pair = made(7);
    std::vector<uint8_t> message = {1, 2, 3, 4, 5};
    Signature signature = pair.sign("attach", message);
    PublicKey key = pair.public_key();
    const auto flip_each = [&](std::span<uint8_t> data) {
        for (size_t bit = 0; bit < data.size() * 8; ++bit) {
            data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
            EXPECT_FALSE(verify(key, "attach", message, signature)) << bit;
            data[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        }
    };
    flip_each(signature);
    flip_each(message);
    flip_each(key.bytes);
    EXPECT_TRUE(verify(key, "attach", message, signature));
}

// The order of the curve's group added to the signature's second half is the same number for a
// careless verifier.
TEST(Keys, ASignatureHasOneSpelling) {
    const auto order =
        *decode_hex("edd3f55c1a631258d69cf7a2def9de1400000000000000000000000000000010");
    const KeyPair pair = made(9);
    Signature signature = pair.sign("x", bytes_of("y"));
    unsigned carry = 0;
    for (size_t i = 0; i < 32; ++i) {
        carry += signature[32 + i] + order[i];
        signature[32 + i] = static_cast<uint8_t>(carry);
        carry >>= 8;
    }
    EXPECT_EQ(carry, 0u);
    EXPECT_FALSE(verify(pair.public_key(), "x", bytes_of("y"), signature));
}

// For the neutral point as key, R = neutral and S = 0 would fit every message.
TEST(Keys, WeakKeysSignNothing) {
    const char* const weak[] = {
        "0100000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000080",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000000000000000000000000000000000000000000000000080",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    };
    Signature forged = {};
    forged[0] = 1;
    for (const char* hex : weak) {
        EXPECT_FALSE(parse_public_key(hex)) << hex;
        PublicKey key;
        std::ranges::copy(*decode_hex(hex), key.bytes.begin());
        for (uint8_t i = 0; i < 64; ++i) {
            EXPECT_FALSE(verify(key, "attach", {&i, 1}, forged)) << hex;
        }
    }
}

TEST(Keys, PublicKeysAsText) {
    const PublicKey key = made(3).public_key();
    EXPECT_EQ(parse_public_key(to_hex(key)).value(), key);
    std::string upper = to_hex(key);
    std::ranges::transform(upper, upper.begin(), [](char c) { return c >= 'a' ? c - 32 : c; });
    for (const std::string& text :
         {std::string(), to_hex(key).substr(2), to_hex(key) + "00", " " + to_hex(key), upper}) {
        const auto parsed = parse_public_key(text);
        ASSERT_FALSE(parsed) << text;
        EXPECT_EQ(parsed.error().code, Errc::kBadInput);
    }
}

}  // namespace
}  // namespace kvasir::crypto
