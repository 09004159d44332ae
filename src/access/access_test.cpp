// check(): which ATTACH is believed, and what is said about one that is not.
#include "access/access.hpp"

#include <gtest/gtest.h>

namespace kvasir::access {
namespace {

using crypto::WallTime;
using std::chrono::seconds;

std::shared_ptr<const crypto::KeyPair> key_of(uint8_t seed) {
    std::array<uint8_t, 32> bytes;
    bytes.fill(seed);
    return std::make_shared<const crypto::KeyPair>(crypto::KeyPair::from_seed(bytes).value());
}

class AccessTest : public ::testing::Test {
protected:
    AccessTest() {
        claims_.roles = crypto::kRoleWorker;
        claims_.node = node_->public_key();
        claims_.issued = now_;
        claims_.expires = now_ + seconds(60);
    }
    wire::Attach attach(wire::Role role = wire::Role::kWorker) const {
        return make_attach(nonce_, role, {node_, crypto::issue_token(*market_, claims_), "w"});
    }
    void expect(const wire::Attach& attach, Errc code, std::string_view says,
                wire::Role role = wire::Role::kWorker, seconds later = seconds(0)) {
        const auto claims =
            check(attach, role, &nonce_, market_->public_key(), now_ + later, crypto::kClockLeeway);
        ASSERT_FALSE(claims) << says;
        EXPECT_EQ(claims.error().code, code) << claims.error().detail;
        EXPECT_NE(claims.error().detail.find(says), std::string::npos) << claims.error().detail;
        EXPECT_EQ(claims.error().detail.find(attach.token.empty() ? "kvt1." : attach.token),
                  std::string::npos)
            << "an error is logged and sent";
    }

    const std::shared_ptr<const crypto::KeyPair> market_ = key_of(1), node_ = key_of(2);
    const WallTime now_{seconds(1'800'000'000)};
    wire::Nonce nonce_ = {3};
    crypto::TokenClaims claims_;
};

TEST_F(AccessTest, WhatANodeShowsIsBelieved) {
    for (const auto& [role, bit] : {std::pair{wire::Role::kWorker, crypto::kRoleWorker},
                                    std::pair{wire::Role::kBackbone, crypto::kRoleBackbone},
                                    std::pair{wire::Role::kObserver, crypto::kRoleObserver}}) {
        claims_.roles = bit;
        const auto shown = attach(role);
        EXPECT_TRUE(check(shown, role, &nonce_, market_->public_key(), now_, seconds(0)));
        // A RENEW has no signature of its own: the connection is known.
        wire::Attach renew;
        renew.node = shown.node;
        renew.token = shown.token;
        EXPECT_TRUE(check(renew, role, nullptr, market_->public_key(), now_, seconds(0)));
        EXPECT_FALSE(check(renew, role, &nonce_, market_->public_key(), now_, seconds(0)));
    }
}

TEST_F(AccessTest, EverythingElseIsNot) {
    wire::Attach other = attach();
    other.major = wire::kProtocolMajor + 1;
    expect(other, Errc::kVersion, "update the older one");

    other = attach();
    other.token.clear();
    expect(other, Errc::kDenied, "no token");
    other = attach();
    other.token.back() = other.token.back() == 'A' ? 'Q' : 'A';
    expect(other, Errc::kDenied, "node token");

    expect(attach(), Errc::kExpired, "renew it", wire::Role::kWorker, seconds(60));
    expect(attach(), Errc::kDenied, "set its clock", wire::Role::kWorker,
           -crypto::kClockLeeway - seconds(1));
    expect(attach(wire::Role::kBackbone), Errc::kDenied, "does not allow this role",
           wire::Role::kBackbone);

    // A stolen token: shown by another key, in that one's name and in its own.
    const Credentials thief = {key_of(4), attach().token, "thief"};
    other = make_attach(nonce_, wire::Role::kWorker, thief);
    expect(other, Errc::kDenied, "another node's");
    other.node = node_->public_key().bytes;
    expect(other, Errc::kDenied, "not by the node's key");
    // A signature of another connection.
    other = attach();
    nonce_[31] ^= 1;
    expect(other, Errc::kDenied, "over this connection's nonce");
}

}  // namespace
}  // namespace kvasir::access
