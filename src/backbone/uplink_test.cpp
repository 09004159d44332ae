// L4: the uplink's connection outlives its tokens: they are renewed on it, whatever the market and
// the relay do in between.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>

#include "backbone/scripted_relay_testing.hpp"
#include "backbone/swarm_testing.hpp"

namespace kvasir::backbone::testing {
namespace {

using Renewal = ScriptedRelay::Renewal;
using Bytes = ScriptedRelay::Bytes;

constexpr auto kShort = 300ms;
constexpr auto kLong = std::chrono::hours(1);

Bytes good_for(std::chrono::milliseconds left, const Renewal& renewal) {
    return ScriptedRelay::attached(left, renewal.request);
}

Bytes refusal(Errc code, uint32_t request) {
    return wire::encode_error({code, "not this one"}, request);
}

// A backbone whose market makes token 1, 2, 3, ...: what `token_of` says of each call.
class AttachedBackbone {
public:
    explicit AttachedBackbone(
        const ScriptedRelay& relay, std::function<int(int call)> token_of = [](int n) { return n; },
        std::chrono::milliseconds answer_max = 60s)
        : token_of_(std::move(token_of)), swarm_(true, 150ms, {options(relay, answer_max)}) {}

    int asked() const { return calls_.load(); }

private:
    UplinkOptions options(const ScriptedRelay& relay, std::chrono::milliseconds answer_max) {
        UplinkOptions options;
        options.endpoint.host = "127.0.0.1";
        options.endpoint.port = relay.port();
        options.credentials = [this] {
            const int token = token_of_(++calls_);
            return access::Credentials{key_, "token " + std::to_string(token), "backbone"};
        };
        options.pause_first = 20ms;
        options.pause_max = 40ms;
        options.answer_max = answer_max;
        return options;
    }

    const std::shared_ptr<const crypto::KeyPair> key_ =
        std::make_shared<const crypto::KeyPair>(*crypto::KeyPair::generate());
    const std::function<int(int)> token_of_;
    std::atomic<int> calls_{0};
    ToySwarm swarm_;
};

TEST(Uplink, RenewsItsTokenOnTheLiveConnection) {
    ScriptedRelay relay(kShort, [](const Renewal& renewal) { return good_for(kShort, renewal); });
    const AttachedBackbone backbone(relay);
    ASSERT_TRUE(eventually([&] { return relay.renewals().size() >= 3; }));
    const auto renewals = relay.renewals();
    for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(renewals[i].connection, 1u);
        EXPECT_EQ(renewals[i].request, i + 1) << "answers must be told apart";
        EXPECT_EQ(renewals[i].token, "token " + std::to_string(i + 2));
    }
    EXPECT_EQ(relay.attaches(), std::vector<std::string>{"token 1"});
}

TEST(Uplink, AsksForNoTokenBeforeItsTime) {
    ScriptedRelay relay(kLong, [](const Renewal& renewal) { return good_for(kLong, renewal); });
    const AttachedBackbone backbone(relay);
    ASSERT_TRUE(eventually([&] { return relay.attaches().size() == 1; }));
    const auto end = net::Clock::now() + 300ms;
    eventually([&] { return net::Clock::now() >= end; });
    EXPECT_EQ(backbone.asked(), 1);
    EXPECT_TRUE(relay.renewals().empty());
}

TEST(Uplink, AMarketThatIsAwayIsAskedAgain) {
    ScriptedRelay relay(kShort, [](const Renewal& renewal) { return good_for(kLong, renewal); });
    // The market cannot be reached for six attempts: the token stays what it was.
    const AttachedBackbone backbone(relay, [](int call) { return call < 8 ? 1 : 2; });
    ASSERT_TRUE(eventually([&] { return !relay.renewals().empty(); }));
    EXPECT_EQ(backbone.asked(), 8);
    EXPECT_EQ(relay.renewals().front().token, "token 2");
    EXPECT_EQ(relay.attaches().size(), 1u);
}

TEST(Uplink, ARefusedTokenIsNotTheEnd) {
    ScriptedRelay relay(kShort, [](const Renewal& renewal) {
        return renewal.request <= 3 ? refusal(Errc::kDenied, renewal.request)
                                    : good_for(kShort, renewal);
    });
    const AttachedBackbone backbone(relay);
    ASSERT_TRUE(eventually([&] { return relay.renewals().size() >= 5; }));
    EXPECT_EQ(relay.attaches().size(), 1u);
}

// No answer, and then one to something else: neither says that the token is renewed.
TEST(Uplink, OnlyTheAnswerToTheNewestTokenCounts) {
    ScriptedRelay relay(kShort, [](const Renewal& renewal) -> Bytes {
        if (renewal.request == 1) return {};
        if (renewal.request == 2) return ScriptedRelay::attached(kLong, 1);
        if (renewal.request == 3) return ScriptedRelay::attached(kLong, 0);
        return good_for(kLong, renewal);
    });
    // Long enough for the answer that counts, on a slow machine too: a fifth would be one too many.
    const AttachedBackbone backbone(
        relay, [](int call) { return call; }, 1s);
    ASSERT_TRUE(eventually([&] { return relay.renewals().size() >= 4; }));
    const auto end = net::Clock::now() + 2s;
    eventually([&] { return net::Clock::now() >= end; });
    EXPECT_EQ(relay.renewals().size(), 4u);
    EXPECT_EQ(relay.attaches().size(), 1u);
}

TEST(Uplink, AnErrorAboutTheConnectionEndsIt) {
    ScriptedRelay relay(kShort, [](const Renewal& renewal) {
        return renewal.connection == 1 ? refusal(Errc::kExpired, 0) : good_for(kLong, renewal);
    });
    const AttachedBackbone backbone(relay);
    ASSERT_TRUE(eventually([&] { return relay.renewals().size() >= 2; }));
    EXPECT_EQ(relay.attaches(), (std::vector<std::string>{"token 1", "token 3"}));
    EXPECT_EQ(relay.renewals()[1].connection, 2u);
    EXPECT_EQ(relay.renewals()[1].token, "token 4");
}

TEST(Uplink, EndsWhileItWaitsForAnAnswer) {
    ScriptedRelay relay(kShort, [](const Renewal&) { return Bytes(); });
    {
        const AttachedBackbone backbone(
            relay, [](int call) { return call; }, 1h);
        ASSERT_TRUE(eventually([&] { return !relay.renewals().empty(); }));
    }
    EXPECT_EQ(relay.attaches().size(), 1u);
}

TEST(Uplink, BelievesNoTokenLongerThanAYear) {
    wire::Attached attached;
    attached.token_left_ms = ~uint64_t{0};
    EXPECT_EQ(token_left(attached), std::chrono::hours(24 * 365));
    attached.token_left_ms = 1500;
    EXPECT_EQ(token_left(attached), 1500ms);
}

}  // namespace
}  // namespace kvasir::backbone::testing
