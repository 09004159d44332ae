// S4: the hub's own pings, to workers and to relays: who answers stays, whoever has nothing to do;
// who does not is gone in time.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <utility>

#include "backbone/hub_testing.hpp"
#include "net/test_peer.hpp"

namespace kvasir::backbone::testing {
namespace {

using wire::FrameType;

constexpr auto kPing = 200ms;
constexpr auto kSilence = 2500ms;

HubLimits short_times() {
    HubLimits limits;
    limits.ping_interval = kPing;
    limits.silence_max = kSilence;
    return limits;
}

TEST(Ping, AnIdleWorkerThatAnswersStaysAndASilentOneIsGone) {
    HubScene scene(short_times());
    auto worker = scene.worker();
    ASSERT_TRUE(eventually([&] { return scene.hub().sessions().size() == 1; }));
    const auto joined = net::Clock::now();
    ASSERT_TRUE(eventually([&] { return net::Clock::now() - joined > kSilence + 2 * kPing; }));
    EXPECT_FALSE(worker->ended()) << worker->last_error();
    worker->set_mood(Mood::kNever);
    const auto silent = net::Clock::now();
    EXPECT_TRUE(eventually([&] { return scene.hub().sessions().empty(); }));
    EXPECT_GE(net::Clock::now() - silent, kSilence / 2);
}

// A relay that answers stays; then only its answers are lost, and it is left.
TEST(Ping, ARelayIsPingedAndLeftWhenItAnswersNothing) {
    HubScene scene(short_times());
    const auto begin = net::Clock::now();
    auto ends = net::testing::transport_pair(net::testing::Over::kPair);
    net::MessageStream relay(std::move(ends.second), net::Side::kServer, {}, {});
    std::atomic<bool> is_over{false};
    RelayEvents events;
    events.on_end = [&] { is_over.store(true); };
    scene.hub().adopt_relay(net::MessageStream(std::move(ends.first), net::Side::kClient, {}, {}),
                            "relay", std::move(events));
    auto last = begin;
    const auto next_ping = [&]() -> std::optional<uint64_t> {
        const auto message = relay.receive(net::Clock::now() + 10s);
        if (!message) return std::nullopt;
        const auto frame = wire::decode_frame(*message);
        if (!frame || frame->header.type != FrameType::kPing) return std::nullopt;
        EXPECT_EQ(frame->header.peer, 0);
        const auto token = wire::decode_token(frame->payload);
        return token ? std::optional(*token) : std::nullopt;
    };
    for (int pings = 1; net::Clock::now() - begin < kSilence + 2 * kPing; ++pings) {
        const auto token = next_ping();
        ASSERT_TRUE(token);
        last = net::Clock::now();
        EXPECT_LE(pings, (last - begin) / kPing + 1) << "no more often than that";
        ASSERT_TRUE(relay.enqueue(wire::encode_pong(*token)));
        ASSERT_TRUE(relay.flush_until(last + 10s));
    }
    EXPECT_FALSE(is_over.load());
    size_t pings = 0;
    while (next_ping()) ++pings;
    EXPECT_GE(pings, 2u) << "it is asked until the end";
    EXPECT_TRUE(eventually([&] { return is_over.load(); }));
    EXPECT_GE(net::Clock::now() - last, kSilence - 50ms);
}

}  // namespace
}  // namespace kvasir::backbone::testing
