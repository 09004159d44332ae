#include "crypto/revocations.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>

#include "base/bytes.hpp"
#include "base/encoding.hpp"

namespace kvasir::crypto {
namespace {

KeyPair key_of(uint8_t fill) {
    std::array<uint8_t, 32> seed;
    seed.fill(fill);
    return KeyPair::from_seed(seed).value();
}

WallTime at(int64_t count) {
    return WallTime(std::chrono::seconds(count));
}

std::string signed_payload(const KeyPair& key, const std::vector<uint8_t>& payload) {
    return "kvr1." + encode_base64url(payload) + "." +
           encode_base64url(key.sign("revocations", payload));
}

RC_GTEST_PROP(Revocations, ComeBackAsTheyWere, (const std::set<uint64_t>& serials)) {
    const KeyPair market = key_of(1);
    const Revocations list = {at(1750000000), {serials.begin(), serials.end()}};
    const auto back = open_revocations(issue_revocations(market, list), market.public_key());
    RC_ASSERT(back.has_value());
    RC_ASSERT(back->serials == list.serials);
    RC_ASSERT(back->issued == list.issued);
}

TEST(Revocations, TheLargestListFitsTheLimitOfItsText) {
    const KeyPair market = key_of(1);
    Revocations list = {at(1), {}};
    for (uint64_t i = 0; i < kRevokedMax; ++i) list.serials.push_back(UINT64_MAX - kRevokedMax + i);
    const std::string text = issue_revocations(market, list);
    const auto back = open_revocations(text, market.public_key());
    ASSERT_TRUE(back) << back.error().detail;
    EXPECT_EQ(back->serials, list.serials);
}

TEST(Revocations, WhatAnotherKeySignedOrAnybodyChangedIsDenied) {
    const KeyPair market = key_of(1);
    const std::string text = issue_revocations(market, {at(5), {3, 8}});
    EXPECT_EQ(open_revocations(text, key_of(2).public_key()).error().code, Errc::kDenied);
    for (size_t i = 0; i < text.size(); ++i) {
        std::string changed = text;
        changed[i] = changed[i] == 'A' ? 'B' : 'A';
        EXPECT_FALSE(open_revocations(changed, market.public_key())) << "byte " << i;
        EXPECT_FALSE(open_revocations(text.substr(0, i), market.public_key())) << "cut at " << i;
    }
    // A node token is signed by the same key and must not be taken for a list.
    EXPECT_FALSE(open_revocations(issue_token(market, {}), market.public_key()));
}

TEST(Revocations, SignedNonsenseIsDeniedWithTheReason) {
    const KeyPair market = key_of(1);
    const auto payload = [](uint8_t version, int64_t issued, uint32_t count,
                            const std::vector<uint64_t>& serials) {
        ByteWriter out;
        out.u8(version);
        out.u64(static_cast<uint64_t>(issued));
        out.u32(count);
        for (const uint64_t serial : serials) out.u64(serial);
        return out.data();
    };
    const struct {
        std::vector<uint8_t> bytes;
        const char* reason;
    } cases[] = {
        {{}, "version 0"},
        {payload(2, 1, 0, {}), "version 2"},
        {payload(1, 1, 2, {5}), "count"},
        {payload(1, 1, 0, {5}), "count"},
        {payload(1, 1, UINT32_MAX, {5}), "count"},
        {payload(1, -1, 0, {}), "era"},
        {payload(1, INT64_MAX, 0, {}), "era"},
        {payload(1, 1, 2, {5, 5}), "ascend"},
        {payload(1, 1, 2, {6, 5}), "ascend"},
    };
    for (const auto& one : cases) {
        const auto list = open_revocations(signed_payload(market, one.bytes), market.public_key());
        ASSERT_FALSE(list) << one.reason;
        EXPECT_EQ(list.error().code, Errc::kDenied);
        EXPECT_NE(list.error().detail.find(one.reason), std::string::npos) << list.error().detail;
    }
    EXPECT_TRUE(
        open_revocations(signed_payload(market, payload(1, 1, 2, {5, 6})), market.public_key()));
}

}  // namespace
}  // namespace kvasir::crypto
