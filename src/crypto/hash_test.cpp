#include "crypto/hash.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <string>
#include <vector>

namespace kvasir::crypto {
namespace {

std::span<const uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// FIPS 180-4 examples.
TEST(Sha256Test, KnownAnswers) {
    const struct {
        std::string input;
        const char* digest;
    } cases[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {std::string(1000000, 'a'),
         "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
    };
    for (const auto& c : cases) EXPECT_EQ(to_hex(sha256(bytes_of(c.input))), c.digest);
}

TEST(Sha256Test, PiecesOfAnySizeGiveTheDigestOfTheWhole) {
    EXPECT_TRUE(rc::check("streaming equals one-shot",
                          [](const std::vector<uint8_t>& data, const std::vector<size_t>& cuts) {
                              Hasher hasher;
                              std::span<const uint8_t> rest(data);
                              for (size_t cut : cuts) {
                                  const auto piece = rest.first(cut % (rest.size() + 1));
                                  hasher.update(piece);
                                  rest = rest.subspan(piece.size());
                              }
                              hasher.update(rest);
                              RC_ASSERT(hasher.finish() == sha256(data));
                              // finish() resets: the same hasher starts afresh.
                              hasher.update(data);
                              RC_ASSERT(hasher.finish() == sha256(data));
                          }));
}

TEST(Sha256Test, AMovedHasherCarriesItsState) {
    Hasher first;
    first.update(bytes_of("ab"));
    Hasher second(std::move(first));
    second.update(bytes_of("c"));
    EXPECT_EQ(second.finish(), sha256(bytes_of("abc")));
}

TEST(ParseHex, RoundTripsAndRefusesTheRest) {
    const Sha256 digest = sha256(bytes_of("abc"));
    const std::string text = to_hex(digest);
    EXPECT_EQ(parse_hex(text), digest);
    EXPECT_FALSE(parse_hex(""));
    EXPECT_FALSE(parse_hex(text.substr(1)));
    EXPECT_FALSE(parse_hex(text + "0"));
    std::string upper = text;
    upper[0] = 'B';
    EXPECT_FALSE(parse_hex(upper));
    std::string other = text;
    other[63] = 'g';
    EXPECT_FALSE(parse_hex(other));
}

}  // namespace
}  // namespace kvasir::crypto
