// A worker whose relay stops: it finishes what is under way, and goes where the relay says.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "access/held_port_testing.hpp"
#include "base/log_testing.hpp"
#include "worker/relayed_testing.hpp"

namespace kvasir::worker {
namespace {

using namespace testing;

// What it was asked before it leaves is answered, it says so to its backbone, and it goes to the
// address given.
TEST(RelayedWorker, WorksOnThenGoesWhereARelayThatStopsSays) {
    Relay home, next;
    // The next request must come before a worker that leaves finds it quiet.
    Running worker(home, [](WorkerOptions& options) { options.drain_quiet = 2000ms; });
    auto old = home.attached();
    ASSERT_TRUE(old && old->peer_up() && old->welcome() && old->program());
    ASSERT_TRUE(old->move(1000ms, next.url()));
    const auto told = net::Clock::now();
    uint32_t answered = 0;
    for (bool is_leaving = false; !is_leaving;) {
        ASSERT_TRUE(old->send(to_peer(request(++answered))));
        Node::Got got = old->next();
        if (got.type == FrameType::kDrain) {
            is_leaving = true;
            EXPECT_EQ(got.peer, kPeer);
            got = old->next();
        }
        ASSERT_EQ(static_cast<int>(got.type), static_cast<int>(FrameType::kResult)) << answered;
    }
    EXPECT_LT(net::Clock::now() - told, 10s);
    EXPECT_TRUE(old->expect(FrameType::kGoodbye, 0));
    (void)old->next();
    EXPECT_TRUE(old->closed());
    auto fresh = next.attached();
    ASSERT_TRUE(fresh);
    EXPECT_TRUE(fresh->peer_up() && fresh->welcome() && fresh->program() && fresh->compute(1));
    EXPECT_EQ(home.next(0ms), nullptr) << "nobody asks the relay that stops";
    EXPECT_TRUE(worker.end());
}

// A relay that is cut off in the middle is left at once, and the moment stays what it was.
TEST(RelayedWorker, GoesThereWhenTheRelayIsCutOffBeforeItsMoment) {
    Relay home, next;
    Running worker(home);
    auto old = home.attached();
    ASSERT_TRUE(old && old->move(1000ms, next.url()));
    ASSERT_TRUE(old->send(wire::encode_ping(1)));
    ASSERT_EQ(static_cast<int>(old->next().type), static_cast<int>(FrameType::kPong));
    old.reset();
    EXPECT_TRUE(next.attached());
}

TEST(RelayedWorker, ComesBackWhenThereIsNobody) {
    Relay home;
    const access::testing::HeldPort nowhere;
    for (const std::string& url : {nowhere.url(), std::string("ws://127.0.0.1:99999"),
                                   std::string("wss://127.0.0.1:1"), std::string("nonsense")}) {
        SCOPED_TRACE(url);
        Running worker(home);
        auto old = home.attached();
        ASSERT_TRUE(old && old->move(1ms, url));
        EXPECT_TRUE(old->expect(FrameType::kGoodbye, 0));
        auto again = home.attached();
        ASSERT_TRUE(again);
        EXPECT_TRUE(again->peer_up() && again->welcome());
        EXPECT_FALSE(worker.done());
        EXPECT_TRUE(worker.end());
    }
}

// What is final from the configured relay is not from where it sent us.
TEST(RelayedWorker, ARefusalWhereItWasSentLeadsBack) {
    Relay home, next;
    Running worker(home);
    auto old = home.attached();
    ASSERT_TRUE(old && old->move(1ms, next.url()));
    auto refusing = next.next();
    ASSERT_TRUE(refusing &&
                refusing->send(wire::encode_error({Errc::kRevoked, "who are you?"}, 0)));
    auto again = home.attached();
    ASSERT_TRUE(again);
    ASSERT_TRUE(again->send(wire::encode_error({Errc::kRevoked, "taken back"}, 0)));
    const Status ended = worker.join();
    ASSERT_FALSE(ended);
    EXPECT_EQ(ended.error().code, Errc::kRevoked);
}

// The backbone went home again, and this worker would idle there for ever.
TEST(RelayedWorker, ComesHomeFromWhereNobodyIs) {
    Relay home, next;
    Running worker(home, {}, 100ms);
    auto old = home.attached();
    ASSERT_TRUE(old && old->move(1ms, next.url()));
    auto away = next.attached();
    ASSERT_TRUE(away);
    EXPECT_TRUE(away->expect(FrameType::kGoodbye, 0));
    auto again = home.attached();
    ASSERT_TRUE(again && again->peer_up() && again->welcome());
    EXPECT_TRUE(again->peer_down() && again->is_heard());
    EXPECT_EQ(again->next(300ms).type, FrameType{0});
    EXPECT_FALSE(again->closed()) << "at home it waits for as long as it takes";
}

TEST(RelayedWorker, StaysWhereItWentWhileABackboneIsThere) {
    Relay home, next;
    constexpr auto kAlone = 1500ms;
    Running worker(home, {}, kAlone);
    auto old = home.attached();
    ASSERT_TRUE(old && old->move(1ms, next.url()));
    auto away = next.attached();
    ASSERT_TRUE(away && away->peer_up() && away->welcome());
    EXPECT_EQ(away->next(kAlone * 3 / 2 + 200ms).type, FrameType{0});
    ASSERT_FALSE(away->closed());
    ASSERT_TRUE(away->peer_down());
    EXPECT_TRUE(away->expect(FrameType::kGoodbye, 0));
    EXPECT_TRUE(home.attached());
}

// It has nobody to say DRAIN to, and is leaving only because it was alone.
TEST(RelayedWorker, StaysWithABackboneThatComesWhileItLeavesForLoneliness) {
    Relay home, next;
    constexpr auto kAlone = 50ms;
    Running worker(
        home, [](WorkerOptions& options) { options.drain_quiet = options.drain_max = 20s; },
        kAlone);
    auto old = home.attached();
    ASSERT_TRUE(old && old->move(1ms, next.url()));
    ASSERT_TRUE(old->is_heard());
    old.reset();  // it need not finish there
    auto away = next.attached();
    ASSERT_TRUE(away);
    EXPECT_EQ(away->next(1000ms).type, FrameType{0});
    ASSERT_TRUE(away->peer_up()) << "it is greeted";
    EXPECT_TRUE(away->welcome() && away->program() && away->compute(1));
}

// A backbone that comes to a worker that is leaving is no longer greeted.
TEST(RelayedWorker, SaysNoHelloWhileItLeaves) {
    Relay home;
    Running worker(home, [](WorkerOptions& options) { options.drain_quiet = 2000ms; });
    auto relay = home.attached();
    ASSERT_TRUE(relay && relay->peer_up() && relay->welcome() && relay->move(1ms, ""));
    ASSERT_TRUE(relay->expect(FrameType::kDrain));
    ASSERT_TRUE(relay->say_peer_up(6) && relay->send(wire::encode_ping(1)));
    EXPECT_EQ(static_cast<int>(relay->next().type), static_cast<int>(FrameType::kPong));
}

// A hostile relay must not fill the disk.
TEST(RelayedWorker, OnlyTheFirstMoveIsLogged) {
    const kvasir::testing::LogCapture log;
    Relay home;
    Running worker(home);
    auto relay = home.attached();
    ASSERT_TRUE(relay);
    for (int i = 0; i < 50; ++i) ASSERT_TRUE(relay->move(3600s, home.url() + "/elsewhere"));
    ASSERT_TRUE(relay->is_heard());
    EXPECT_EQ(log.with("the relay stops").size(), 1u);
}

// To the same address: it makes way at once, and nodes come back at moments of their own.
TEST(RelayedWorker, ComesBackToTheSameRelayAtARandomMoment) {
    Relay home;
    constexpr auto kWithin = 400ms;
    std::vector<milliseconds> away;
    // Connections as short as these have a backoff of their own.
    Running worker(home, [](WorkerOptions& options) { options.pause_max = 20ms; });
    auto node = home.next();
    for (int i = 0; i < 8; ++i) {
        ASSERT_TRUE(node && node->attach(20s) && node->move(kWithin, ""));
        ASSERT_TRUE(node->expect(FrameType::kGoodbye, 0));
        const auto left = net::Clock::now();
        node = home.next();
        away.push_back(std::chrono::duration_cast<milliseconds>(net::Clock::now() - left));
    }
    const auto [least, most] = std::ranges::minmax(away);
    EXPECT_LT(least, kWithin);
    EXPECT_GT(most - least, 50ms) << "all after the same pause";
    EXPECT_FALSE(worker.done());
}

}  // namespace
}  // namespace kvasir::worker
