#include "base/encoding.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

namespace kvasir {
namespace {

std::vector<uint8_t> bytes_of(std::string_view text) {
    return {text.begin(), text.end()};
}

// RFC 4648 section 10, without the padding; and the two digits that differ from plain base64.
TEST(Encoding, KnownAnswers) {
    const struct {
        std::string_view data, base64, hex;
    } cases[] = {
        {"", "", ""},
        {"f", "Zg", "66"},
        {"fo", "Zm8", "666f"},
        {"foo", "Zm9v", "666f6f"},
        {"foob", "Zm9vYg", "666f6f62"},
        {"fooba", "Zm9vYmE", "666f6f6261"},
        {"foobar", "Zm9vYmFy", "666f6f626172"},
        {"\xfb\xef\xff", "--__", "fbefff"},
    };
    for (const auto& c : cases) {
        const std::vector<uint8_t> data = bytes_of(c.data);
        EXPECT_EQ(encode_base64url(data), c.base64);
        EXPECT_EQ(decode_base64url(c.base64), data);
        EXPECT_EQ(encode_hex(data), c.hex);
        EXPECT_EQ(decode_hex(c.hex), data);
    }
}

TEST(Encoding, RefusesWhatNoEncoderWrites) {
    for (const std::string_view text : {"6", "6g", "6F", " 66", "66 ", "0x66", "6\xc3"}) {
        EXPECT_FALSE(decode_hex(text)) << text;
    }
    // A lone digit, padding, the plain alphabet, white space, spare bits that are not zero.
    for (const std::string_view text : {"Z", "Zm9vY", "Zg==", "Zm8=", "+/+/", "Zm9v\n", " Zm9v",
                                        "Zh", "Zm9", "Zm\xc3v", "Zm.v"}) {
        EXPECT_FALSE(decode_base64url(text)) << text;
    }
    EXPECT_FALSE(decode_base64url(std::string_view("Zm\0v", 4)));
}

RC_GTEST_PROP(EncodingProperty, RoundTrips, (const std::vector<uint8_t>& data)) {
    RC_ASSERT(decode_hex(encode_hex(data)) == data);
    RC_ASSERT(decode_base64url(encode_base64url(data)) == data);
}

// Two texts never mean the same bytes, so a token or code cannot be rewritten without a change.
RC_GTEST_PROP(EncodingProperty, WhatDecodesIsWhatTheEncoderWrites, ()) {
    const auto letters = rc::gen::elementOf(
        std::string("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_-_AAAA=+/. "));
    const std::string text = *rc::gen::container<std::string>(letters);
    if (const auto data = decode_base64url(text)) RC_ASSERT(encode_base64url(*data) == text);
    if (const auto data = decode_hex(text)) RC_ASSERT(encode_hex(*data) == text);
}

}  // namespace
}  // namespace kvasir
