// The hub's connections to relays: what comes with their end, who is there, who is replaced.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backbone/hub_testing.hpp"
#include "backbone/link.hpp"
#include "backbone/session.hpp"
#include "base/log_testing.hpp"
#include "net/test_peer.hpp"
#include "wire/attach.hpp"

namespace kvasir::backbone::testing {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr auto kNever = net::Deadline::max();

Bytes peer_up(uint16_t peer, uint8_t node) {
    wire::PeerUp up;
    up.handle = peer;
    up.role = wire::Role::kWorker;
    up.node.fill(node);
    return wire::encode_peer_up(up);
}

// A relay's end of a connection; notes what the hub tells of it.
class RelayEnd {
public:
    RelayEnd() : RelayEnd(net::testing::transport_pair(net::testing::Over::kPair)) {}

    void say(const Bytes& message) {
        KVASIR_CHECK(stream_.enqueue(message).has_value());
        KVASIR_CHECK(stream_.flush_until(net::Clock::now() + 20s).has_value());
    }
    void close() { stream_.close(); }
    // `before_end` is called on the hub's thread.
    void join(Hub& hub, std::function<void()> before_end = {}) {
        RelayEvents events;
        events.on_move = [notes = notes_](const wire::Move& move) {
            notes->add("move " + move.url);
            return kNever;
        };
        events.on_company = [notes = notes_](bool has_company) {
            notes->add(has_company ? "company" : "alone");
            return notes->leave_at.load();
        };
        events.on_end = [notes = notes_, before_end = std::move(before_end)] {
            if (before_end) before_end();
            notes->add("end");
        };
        hub.adopt_relay(std::move(*hubs_), "relay", std::move(events));
        hubs_.reset();
    }
    // The next company is to be left at this moment.
    void leave_at(net::Deadline moment) { notes_->leave_at.store(moment); }
    std::vector<std::string> notes() const {
        const std::lock_guard lock(notes_->mu);
        return notes_->all;
    }
    bool has_ended() const {
        const auto all = notes();
        return !all.empty() && all.back() == "end";
    }

private:
    struct Notes {
        void add(const std::string& note) {
            const std::lock_guard lock(mu);
            all.push_back(note);
        }
        mutable std::mutex mu;
        std::vector<std::string> all;  // Guarded by mu
        std::atomic<net::Deadline> leave_at{kNever};
    };

    explicit RelayEnd(std::pair<net::Transport, net::Transport> ends)
        : hubs_(std::make_unique<net::MessageStream>(std::move(ends.first), net::Side::kClient,
                                                     Bytes{}, net::MessageLimits{})),
          stream_(std::move(ends.second), net::Side::kServer, {}, {}) {}

    std::unique_ptr<net::MessageStream> hubs_;
    net::MessageStream stream_;
    std::shared_ptr<Notes> notes_ = std::make_shared<Notes>();
};

using Notes = std::vector<std::string>;

// The PONG finds the connection closed; the MOVE behind the PING must count all the same.
TEST(HubLinks, AMoveBehindAPingCountsWhenTheRelayHasGone) {
    HubScene scene;
    RelayEnd relay;
    relay.say(wire::encode_ping(1));
    relay.say(wire::encode_move({0, "ws://next:1"}));
    relay.close();
    relay.join(scene.hub());  // all of it is read at once
    ASSERT_TRUE(eventually([&] { return relay.has_ended(); }));
    EXPECT_EQ(relay.notes(), (Notes{"alone", "move ws://next:1", "end"}));
}

// A lane reads the MOVE and the end of the connection while the hub takes ended ones away.
TEST(HubLinks, AMoveThatAnotherThreadReadCounts) {
    std::promise<void> read;
    const auto until_read = read.get_future().share();
    std::atomic<bool> is_sweeping{false};
    HubScene scene;
    RelayEnd first, second;
    first.join(scene.hub(), [&is_sweeping, until_read] {
        is_sweeping.store(true);
        (void)until_read.wait_for(20s);
    });
    second.join(scene.hub());
    second.say(peer_up(3, 3));
    second.say(scene.hello(3));
    ASSERT_TRUE(eventually([&] { return scene.hub().sessions().size() == 1; }));
    const auto link = scene.hub().sessions()[0]->link();
    first.close();
    ASSERT_TRUE(eventually([&] { return is_sweeping.load(); }));
    second.say(wire::encode_move({0, "ws://next:1"}));
    second.close();
    const int lane = 0;
    ASSERT_TRUE(eventually([&] {
        if (link->claim(&lane)) (void)link->pump(nullptr, {});
        return !link->open();
    }));
    read.set_value();
    ASSERT_TRUE(eventually([&] { return second.has_ended(); }));
    EXPECT_EQ(second.notes(), (Notes{"alone", "company", "move ws://next:1", "end"}));
}

// What has died on one way may live on another.
TEST(HubLinks, AHelloThatCameWithTheEndReplacesNobody) {
    HubScene scene;
    RelayEnd alive, dead;
    alive.join(scene.hub());
    alive.say(peer_up(3, 9));
    alive.say(scene.hello(3));
    ASSERT_TRUE(eventually([&] { return scene.hub().sessions().size() == 1; }));
    const auto session = scene.hub().sessions()[0];
    dead.say(peer_up(4, 9));
    dead.say(scene.hello(4));
    dead.close();
    dead.join(scene.hub());
    ASSERT_TRUE(eventually([&] { return dead.has_ended(); }));
    EXPECT_TRUE(session->open());
}

// A hostile relay must not fill the disk.
TEST(HubLinks, OnlyTheFirstMoveCountsAndIsLogged) {
    const kvasir::testing::LogCapture log;
    HubScene scene;
    RelayEnd relay;
    relay.join(scene.hub());
    for (int i = 0; i < 50; ++i) relay.say(wire::encode_move({0, "ws://next:1"}));
    relay.close();
    ASSERT_TRUE(eventually([&] { return relay.has_ended(); }));
    EXPECT_EQ(relay.notes(), (Notes{"alone", "move ws://next:1", "end"}));
    EXPECT_EQ(log.with("its nodes go to").size(), 1u);
}

TEST(HubLinks, TellsWhetherAnyWorkerIsThereAndLeavesWhenAsked) {
    HubScene scene;
    RelayEnd relay;
    relay.join(scene.hub());
    relay.say(peer_up(3, 3));
    relay.say(peer_up(4, 4));
    wire::PeerUp backbone;
    backbone.handle = 5;
    backbone.role = wire::Role::kBackbone;
    relay.say(wire::encode_peer_up(backbone));
    relay.say(wire::encode_peer_down({3, 0, "gone"}));
    ASSERT_TRUE(eventually([&] { return relay.notes().size() >= 2; }));
    relay.leave_at(net::Clock::now());
    relay.say(wire::encode_peer_down({4, 0, "gone"}));
    ASSERT_TRUE(eventually([&] { return relay.has_ended(); })) << "alone, it is left";
    EXPECT_EQ(relay.notes(), (Notes{"alone", "company", "alone", "end"}));
}

// A full hub has room for a worker that comes back before its old connection is known to be dead.
TEST(HubLinks, ANodeThatComesBackToAFullHubReplacesItself) {
    HubLimits limits;
    limits.sessions_max = 1;
    HubScene scene(limits);
    wire::NodeId node{};
    node.fill(9);
    auto older = scene.worker("older", node);
    ASSERT_TRUE(eventually([&] { return scene.hub().sessions().size() == 1; }));
    auto newer = scene.worker("newer", node);
    ASSERT_TRUE(eventually([&] { return older->ended() || newer->ended(); }));
    EXPECT_FALSE(newer->ended()) << newer->last_error();
    auto another = scene.worker("another");
    ASSERT_TRUE(eventually([&] { return another->ended(); }));
    EXPECT_EQ(another->last_code(), Errc::kBusy);
    ASSERT_TRUE(eventually([&] { return scene.hub().sessions().size() == 1; }));
    EXPECT_EQ(scene.hub().sessions()[0]->hello().name, "newer");
}

}  // namespace
}  // namespace kvasir::backbone::testing
