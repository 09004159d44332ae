// S4: the hub's own pings, to workers and to relays: who answers stays, whoever has nothing to do;
// who does not is gone in time.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "backbone/hub.hpp"
#include "backbone/swarm_testing.hpp"
#include "net/test_peer.hpp"

namespace kvasir::backbone::testing {
namespace {

using wire::FrameType;

constexpr auto kPing = 200ms;
constexpr auto kSilence = 1500ms;

// A hub with short times and a model whose programs nobody has shown: its workers are idle.
class PingingHub {
public:
    PingingHub() {
        auto engine = toy::make_engine();
        auto replica = Replica::open(toy_file().path, true, toy_file().cache);
        KVASIR_CHECK(replica.has_value());
        replica_ = std::move(*replica);
        board_ = std::make_unique<RosterBoard>(
            std::map<LayerKey, uint32_t>{{kLayer0, kToyExperts}, {kLayer1, kToyExperts}});
        verifier_ = std::make_unique<Verifier>(*replica_, *board_, std::move(engine), true);
        HubOptions options;
        options.listen = "127.0.0.1:0";
        options.limits.ping_interval = kPing;
        options.limits.silence_max = kSilence;
        auto hub = Hub::make(std::move(options), *replica_, *board_, *verifier_);
        KVASIR_CHECK(hub.has_value());
        hub_ = std::move(*hub);
    }
    ~PingingHub() {
        hub_.reset();
        verifier_.reset();
    }
    Hub& hub() { return *hub_; }
    std::unique_ptr<FakeWorker> worker() const {
        FakeOptions options;
        options.model = toy_file().path;
        options.cache_dir = toy_file().cache;
        options.segments = {{kLayer0, 0, 8}};
        options.port = hub_->port();
        return std::make_unique<FakeWorker>(std::move(options));
    }

private:
    std::unique_ptr<Replica> replica_;
    std::unique_ptr<RosterBoard> board_;
    std::unique_ptr<Verifier> verifier_;
    std::unique_ptr<Hub> hub_;
};

TEST(Ping, AnIdleWorkerThatAnswersStaysAndASilentOneIsGone) {
    PingingHub scene;
    auto worker = scene.worker();
    ASSERT_TRUE(eventually([&] { return scene.hub().sessions().size() == 1; }));
    const auto joined = net::Clock::now();
    ASSERT_TRUE(eventually([&] { return net::Clock::now() - joined > 2 * kSilence; }));
    EXPECT_FALSE(worker->ended()) << worker->last_error();
    worker->set_mood(Mood::kNever);
    const auto silent = net::Clock::now();
    EXPECT_TRUE(eventually([&] { return scene.hub().sessions().empty(); }));
    EXPECT_GE(net::Clock::now() - silent, kSilence - kPing - 500ms);
}

// A relay that answers stays; then only its answers are lost, and it is left.
TEST(Ping, ARelayIsPingedAndLeftWhenItAnswersNothing) {
    PingingHub scene;
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
    while (net::Clock::now() - begin < 2 * kSilence) {
        const auto token = next_ping();
        ASSERT_TRUE(token);
        EXPECT_GE(net::Clock::now() - last, kPing - 20ms) << "no more often than that";
        last = net::Clock::now();
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
