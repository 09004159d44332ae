// The gate by the clock: the leeway of a market that is ahead, the end, and what is left.
#include "relay/token_gate.hpp"

#include <gtest/gtest.h>

#include "access/access.hpp"

namespace kvasir::relay {
namespace {

using crypto::WallTime;

crypto::KeyPair key_of(uint8_t seed) {
    std::array<uint8_t, 32> bytes;
    bytes.fill(seed);
    return crypto::KeyPair::from_seed(bytes).value();
}

class TokenGateTest : public ::testing::Test {
protected:
    TokenGateTest() {
        options_.market = market_.public_key();
        options_.wall_now = [this] { return now_; };
        claims_.roles = crypto::kRoleWorker;
        claims_.name = "w";
        claims_.node = node_->public_key();
        claims_.serial = 7;
        claims_.issued = now_;
        claims_.expires = now_ + seconds(3600);
        claims_.model_id.fill(9);
    }
    std::string token() const { return crypto::issue_token(market_, claims_); }
    // At attaching and when a token is renewed, which must agree.
    Result<Admission> ask(wire::Role role = wire::Role::kWorker) {
        TokenGate gate(options_);
        const auto attach = access::make_attach(nonce_, role, {node_, token(), "w"});
        auto admitted = gate.admit(nonce_, role, attach);
        const auto renewed = gate.renew(attach.node, role, attach.token);
        EXPECT_EQ(admitted.has_value(), renewed.has_value());
        if (admitted && renewed) {
            EXPECT_EQ(admitted->left, renewed->left);
            EXPECT_EQ(admitted->serial, 7u);
            EXPECT_EQ(admitted->model_id, claims_.model_id);
        }
        return admitted;
    }

    const crypto::KeyPair market_ = key_of(1);
    const std::shared_ptr<const crypto::KeyPair> node_ =
        std::make_shared<const crypto::KeyPair>(key_of(2));
    const wire::Nonce nonce_ = {3};
    WallTime now_{seconds(1'800'000'000)};
    GateOptions options_;
    crypto::TokenClaims claims_;
};

TEST_F(TokenGateTest, TheMarketsClockMayBeAheadByTheLeeway) {
    EXPECT_EQ(options_.leeway, seconds(300)) << "docs/protocol.md says so";
    const WallTime relay = now_;
    for (const int64_t ahead : {-3599, -1, 0, 1, 299, 300}) {
        now_ = relay - seconds(ahead);
        const auto admitted = ask();
        ASSERT_TRUE(admitted) << ahead << ": " << admitted.error().detail;
        EXPECT_EQ(admitted->left, seconds(3600 + ahead));
    }
    for (const int64_t ahead : {301, 86400}) {
        now_ = relay - seconds(ahead);
        const auto admitted = ask();
        ASSERT_FALSE(admitted) << ahead;
        EXPECT_EQ(admitted.error().code, Errc::kDenied);
        EXPECT_NE(admitted.error().detail.find("in the future by this machine's clock"),
                  std::string::npos)
            << admitted.error().detail;
    }
}

TEST_F(TokenGateTest, TheEndHasNoLeeway) {
    now_ += seconds(3599);
    EXPECT_EQ(ask()->left, seconds(1));
    now_ += seconds(1);
    const auto late = ask();
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code, Errc::kExpired);
    // The last moment that there is must not overflow.
    claims_.expires = WallTime(seconds(crypto::kSecondsMax));
    const auto far = ask();
    ASSERT_TRUE(far);
    EXPECT_GT(far->left, std::chrono::hours(24 * 365));
}

TEST_F(TokenGateTest, RolesMarketsAndRevocation) {
    EXPECT_EQ(ask(wire::Role::kBackbone).error().code, Errc::kDenied);
    options_.is_revoked = [this](uint64_t serial, const crypto::PublicKey& node) {
        return serial == 7 && node == node_->public_key();
    };
    EXPECT_EQ(ask().error().code, Errc::kRevoked);
    options_.is_revoked = {};
    EXPECT_TRUE(ask());
    options_.market = key_of(4).public_key();
    EXPECT_EQ(ask().error().code, Errc::kDenied);
    // In open mode the key is all there is, and it must sign.
    options_.market.reset();
    TokenGate gate(options_);
    auto attach = access::make_attach(nonce_, wire::Role::kWorker, {node_, "", "w"});
    EXPECT_TRUE(gate.admit(nonce_, wire::Role::kWorker, attach));
    EXPECT_EQ(gate.admit({4}, wire::Role::kWorker, attach).error().code, Errc::kDenied);
}

}  // namespace
}  // namespace kvasir::relay
