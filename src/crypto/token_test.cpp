#include "crypto/token.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <limits>

#include "base/encoding.hpp"

namespace kvasir::crypto {
namespace {

using std::chrono::seconds;

KeyPair key_of(uint8_t fill) {
    std::array<uint8_t, 32> seed;
    seed.fill(fill);
    return KeyPair::from_seed(seed).value();
}

KeyPair rfc_key() {
    std::array<uint8_t, 32> seed;
    std::ranges::copy(
        *decode_hex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"),
        seed.begin());
    return KeyPair::from_seed(seed).value();
}

WallTime at(int64_t count) {
    return WallTime(seconds(count));
}

TokenClaims sample_claims() {
    TokenClaims claims;
    claims.roles = kRoleWorker | kRoleBackbone;
    claims.name = "phone";
    for (uint8_t i = 0; i < 32; ++i) claims.node.bytes[i] = i;
    claims.serial = 0x0102030405060708;
    claims.issued = at(1750000000);
    claims.expires = at(1750086400);
    claims.model_id.fill(0xaa);
    return claims;
}

void expect_same(const TokenClaims& a, const TokenClaims& b) {
    EXPECT_EQ(a.roles, b.roles);
    EXPECT_EQ(a.name, b.name);
    EXPECT_EQ(a.node, b.node);
    EXPECT_EQ(a.serial, b.serial);
    EXPECT_EQ(a.issued, b.issued);
    EXPECT_EQ(a.expires, b.expires);
    EXPECT_EQ(a.model_id, b.model_id);
}

// Text of another implementation.
TEST(Token, KnownAnswer) {
    const std::string text = issue_token(rfc_key(), sample_claims());
    EXPECT_EQ(text,
              "kvt1.AQMFAHBob25lAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8IBwYFBAMCAYDhTmgAAAAA"
              "ADNQaAAAAACqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqg.1prA-yngrQx_7FLBQnp6Bw_Nmo"
              "CXuSZ8zrVjX3UtKVKlhU26g6tSay6VoTFBhEQiXHtjdPgXQTroOUShcYtkDA");
    expect_same(open_token(text, rfc_key().public_key()).value(), sample_claims());
}

RC_GTEST_PROP(TokenProperty, RoundTrips, ()) {
    TokenClaims claims;
    claims.roles = *rc::gen::arbitrary<uint8_t>();
    claims.name = (*rc::gen::string<std::string>()).substr(0, kNameBytesMax);
    for (uint8_t& byte : claims.node.bytes) byte = *rc::gen::arbitrary<uint8_t>();
    for (uint8_t& byte : claims.model_id) byte = *rc::gen::arbitrary<uint8_t>();
    claims.serial = *rc::gen::arbitrary<uint64_t>();
    claims.issued = at(*rc::gen::inRange<int64_t>(0, 253402300800));
    claims.expires = at(*rc::gen::inRange<int64_t>(0, 253402300800));
    const KeyPair market = key_of(1);
    const std::string text = issue_token(market, claims);
    RC_ASSERT(text.size() <= kTokenBytesMax);
    const auto opened = open_token(text, market.public_key());
    RC_ASSERT(opened.has_value());
    RC_ASSERT(opened->roles == claims.roles && opened->name == claims.name);
    RC_ASSERT(opened->node == claims.node && opened->serial == claims.serial);
    RC_ASSERT(opened->issued == claims.issued && opened->expires == claims.expires);
    RC_ASSERT(opened->model_id == claims.model_id);
    const auto elsewhere = open_token(text, key_of(2).public_key());
    RC_ASSERT(!elsewhere && elsewhere.error().code == Errc::kDenied);
}

TEST(Token, ALongNameIsCut) {
    TokenClaims claims = sample_claims();
    claims.name = std::string(1000, 'n');
    const auto opened = open_token(issue_token(key_of(1), claims), key_of(1).public_key());
    EXPECT_EQ(opened.value().name, std::string(kNameBytesMax, 'n'));
}

TEST(Token, EveryFlippedBitAndEveryCutIsRefused) {
    const KeyPair market = key_of(1);
    const std::string text = issue_token(market, sample_claims());
    for (size_t bit = 0; bit < text.size() * 8; ++bit) {
        std::string other = text;
        other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
        const auto opened = open_token(other, market.public_key());
        ASSERT_FALSE(opened) << bit;
        EXPECT_EQ(opened.error().code, Errc::kDenied);
    }
    for (size_t bytes = 0; bytes < text.size(); ++bytes) {
        EXPECT_FALSE(open_token(text.substr(0, bytes), market.public_key())) << bytes;
        EXPECT_FALSE(open_token(text.substr(bytes + 1), market.public_key())) << bytes;
    }
    for (const char* more : {"A", "AA", ".", "=", " ", "\n", ".AA"}) {
        EXPECT_FALSE(open_token(text + more, market.public_key())) << more;
        EXPECT_FALSE(open_token(more + text, market.public_key())) << more;
    }
    EXPECT_FALSE(open_token(text + std::string(1 << 20, 'A'), market.public_key()));
}

// A payload that the market did sign, but that is not as documented.
TEST(Token, EverySignedButMalformedPayloadIsRefused) {
    const KeyPair market = key_of(1);
    const auto open = [&](std::string_view context, const std::vector<uint8_t>& payload) {
        return open_token("kvt1." + encode_base64url(payload) + "." +
                              encode_base64url(market.sign(context, payload)),
                          market.public_key());
    };
    const std::string text = issue_token(market, sample_claims());
    const size_t dot = text.rfind('.');
    const std::vector<uint8_t> good = *decode_base64url(text.substr(5, dot - 5));
    ASSERT_TRUE(open("node-token", good));
    EXPECT_FALSE(open("attach", good)) << "a signature of another kind";
    EXPECT_FALSE(open("", good));
    for (size_t bytes = 0; bytes < good.size(); ++bytes) {
        const auto cut = open("node-token", {good.begin(), good.begin() + static_cast<int>(bytes)});
        ASSERT_FALSE(cut) << bytes;
        EXPECT_EQ(cut.error().code, Errc::kDenied);
    }
    const auto changed = [&](size_t offset, uint8_t value) {
        std::vector<uint8_t> payload = good;
        payload[offset] = value;
        return open("node-token", payload);
    };
    std::vector<uint8_t> longer = good;
    longer.push_back(0);
    EXPECT_NE(open("node-token", longer).error().detail.find("left over"), std::string::npos);
    EXPECT_NE(changed(0, 2).error().detail.find("version 2"), std::string::npos);
    EXPECT_NE(changed(2, 65).error().detail.find("name"), std::string::npos);
    EXPECT_FALSE(changed(2, 4));
    EXPECT_FALSE(changed(3, 255));
    EXPECT_NE(changed(4 + 5 + 32 + 8 + 7, 0x80).error().detail.find("issued"), std::string::npos);
    EXPECT_NE(changed(4 + 5 + 32 + 16 + 7, 0x7f).error().detail.find("expires"), std::string::npos);
}

// The verifier's clock is off by these; the token is a day long and one second old by the market's.
TEST(TokenTime, SkewWithinTheLeewayIsNoReasonToRefuse) {
    const TokenClaims claims = sample_claims();
    const seconds leeway(120);
    const auto check = [&](int64_t offset) {
        return check_time(claims, claims.issued + seconds(1) + seconds(offset), leeway);
    };
    // -0.8 s and +0.8 s are -1 or 0 and 0 or 1 in whole seconds.
    for (const int64_t offset : {-121, -120, -1, 0, 1, 120, 86398}) {
        EXPECT_TRUE(check(offset)) << offset;
    }
    for (const int64_t offset : {-122, -86400}) {
        const Status status = check(offset);
        ASSERT_FALSE(status) << offset;
        EXPECT_EQ(status.error().code, Errc::kDenied);
        EXPECT_NE(status.error().detail.find("clock"), std::string::npos);
    }
    EXPECT_NE(check(-86400).error().detail.find("issued 23 h in the future"), std::string::npos)
        << check(-86400).error().detail;
    for (const int64_t offset : {86399, 86400}) {
        const Status status = check(offset);
        ASSERT_FALSE(status) << offset;
        EXPECT_EQ(status.error().code, Errc::kExpired);
        EXPECT_TRUE(errc_info(status.error().code).retryable);
        EXPECT_NE(status.error().detail.find("2025-06-16 15:06:40 UTC"), std::string::npos)
            << status.error().detail;
    }
}

TEST(TokenTime, AStepOfTheClockDecidesAtOnceAndBack) {
    const TokenClaims claims = sample_claims();
    const WallTime now = claims.issued + seconds(3600);
    EXPECT_TRUE(check_time(claims, now, seconds(0)));
    EXPECT_EQ(check_time(claims, now + seconds(86400), seconds(0)).error().code, Errc::kExpired);
    EXPECT_EQ(check_time(claims, now - seconds(86400), seconds(0)).error().code, Errc::kDenied);
    EXPECT_TRUE(check_time(claims, now, seconds(0)));
}

TEST(TokenTime, NoTimeOverflows) {
    constexpr int64_t kLow = std::numeric_limits<int64_t>::min();
    constexpr int64_t kHigh = std::numeric_limits<int64_t>::max();
    for (const int64_t issued : {kLow, int64_t{-1}, int64_t{0}, kHigh}) {
        for (const int64_t expires : {kLow, int64_t{-1}, int64_t{0}, kHigh}) {
            for (const int64_t now : {kLow, int64_t{-1}, int64_t{0}, kHigh}) {
                for (const int64_t leeway : {kLow, int64_t{0}, kHigh}) {
                    TokenClaims claims = sample_claims();
                    claims.issued = at(issued);
                    claims.expires = at(expires);
                    const Status status = check_time(claims, at(now), seconds(leeway));
                    if (now >= 0 && expires <= 0) {
                        EXPECT_FALSE(status);
                    }
                }
            }
        }
    }
}

Invite sample_invite(bool pinned) {
    Invite invite;
    for (uint8_t i = 0; i < 16; ++i) invite.secret[i] = i;
    invite.market = rfc_key().public_key();
    if (pinned) invite.tls_pin.emplace().fill(0x55);
    return invite;
}

// Texts of another implementation.
TEST(InviteCode, KnownAnswers) {
    EXPECT_EQ(to_string(sample_invite(false)),
              "kvi1-AAABAgMEBQYHCAkKCwwNDg_XWpgBgrEKt9VL_tPJZAc6DuFy89qmIyWvAhpo9wdRGpQISQ4");
    EXPECT_EQ(to_string(sample_invite(true)),
              "kvi1-AQABAgMEBQYHCAkKCwwNDg_XWpgBgrEKt9VL_tPJZAc6DuFy89qmIyWvAhpo9wdRGlVVVVVVVVV"
              "VVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVVko6CWQ");
}

RC_GTEST_PROP(InviteProperty, RoundTripsAlsoWithSpaceAroundIt, (bool pinned)) {
    Invite invite;
    for (uint8_t& byte : invite.secret) byte = *rc::gen::arbitrary<uint8_t>();
    for (uint8_t& byte : invite.market.bytes) byte = *rc::gen::arbitrary<uint8_t>();
    if (pinned) {
        for (uint8_t& byte : invite.tls_pin.emplace()) byte = *rc::gen::arbitrary<uint8_t>();
    }
    for (const std::string& text : {to_string(invite), " \t" + to_string(invite) + "\r\n"}) {
        const auto parsed = parse_invite(text);
        RC_ASSERT(parsed.has_value());
        RC_ASSERT(parsed->secret == invite.secret && parsed->market == invite.market);
        RC_ASSERT(parsed->tls_pin == invite.tls_pin);
    }
}

TEST(InviteCode, EveryWrongCharacterIsCaught) {
    for (const bool pinned : {false, true}) {
        const std::string text = to_string(sample_invite(pinned));
        for (size_t i = 0; i < text.size(); ++i) {
            for (int c = 0; c < 256; ++c) {
                std::string other = text;
                if (other[i] == static_cast<char>(c)) continue;
                other[i] = static_cast<char>(c);
                const auto parsed = parse_invite(other);
                ASSERT_FALSE(parsed) << i << " " << c;
                ASSERT_EQ(parsed.error().code, Errc::kUsage);
            }
        }
    }
}

TEST(InviteCode, CutsInsertionsAndSwapsAreCaught) {
    for (const bool pinned : {false, true}) {
        const std::string text = to_string(sample_invite(pinned));
        for (size_t i = 0; i < text.size(); ++i) {
            EXPECT_FALSE(parse_invite(text.substr(0, i))) << i;
            EXPECT_FALSE(parse_invite(text.substr(i + 1))) << i;
            EXPECT_FALSE(parse_invite(std::string(text).erase(i, 1))) << i;
            EXPECT_FALSE(parse_invite(std::string(text).insert(i, 1, 'A'))) << i;
            std::string swapped = text;
            if (i > 0) std::swap(swapped[i - 1], swapped[i]);
            if (swapped != text) {
                EXPECT_FALSE(parse_invite(swapped)) << i;
            }
        }
        EXPECT_FALSE(parse_invite(text + text));
    }
    EXPECT_FALSE(parse_invite(""));
    EXPECT_FALSE(parse_invite("kvi1-"));
    EXPECT_FALSE(parse_invite(std::string("kvi1-") + std::string(1 << 20, 'A')));
    EXPECT_FALSE(parse_invite("KVI1-" + to_string(sample_invite(false)).substr(5)));
}

}  // namespace
}  // namespace kvasir::crypto
