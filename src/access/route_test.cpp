// The rules of moving: when a node leaves a relay that stops, and which one it dials then.
#include "access/route.hpp"

#include <gtest/gtest.h>

#include <set>

namespace kvasir::access {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

const net::Deadline kStart = net::Deadline(1000h);

RelayAddress at(const std::string& url) {
    return {*net::parse_url(url), nullptr};
}

class Clocked {
public:
    explicit Clocked(uint32_t seed = 1, const std::string& home = "ws://home:1",
                     TlsFor tls_for = {})
        : route(at(home), std::move(tls_for), seed) {}
    std::string dials() { return to_string(route.endpoint()); }
    Status move(milliseconds within, const std::string& url) {
        return route.on_move({static_cast<uint32_t>(within.count()), url}, now);
    }

    net::Deadline now = kStart;
    Route route;
};

// To another address: it works on until a random moment, and dials at once then.
TEST(Route, WorksOnUntilARandomMomentAndDialsTheAddressGiven) {
    constexpr auto kWithin = 10s;
    std::set<milliseconds> moments;
    bool early = false, late = false;
    for (uint32_t seed = 0; seed < 200; ++seed) {
        Clocked node(seed);
        node.route.on_attached(node.now);
        EXPECT_EQ(node.route.leave_at(), net::Deadline::max());
        node.now += 6s;
        ASSERT_TRUE(node.move(kWithin, "ws://away:2"));
        const auto stays =
            std::chrono::duration_cast<milliseconds>(node.route.leave_at() - node.now);
        EXPECT_GE(stays, 0ms);
        EXPECT_LT(stays, kWithin);
        moments.insert(stays);
        early |= stays < kWithin / 4;
        late |= stays > kWithin * 3 / 4;
        EXPECT_EQ(node.dials(), "home:1");
        node.now = node.route.leave_at() + 300ms;  // what was under way
        const auto end = node.route.on_end(node.now);
        EXPECT_EQ(end.pause, 0ms);
        EXPECT_EQ(end.pause_or(7s), 0ms);
        EXPECT_EQ(node.dials(), "away:2");
    }
    EXPECT_GT(moments.size(), 150u) << "a thousand nodes must not come at once";
    EXPECT_TRUE(early && late);
}

// To the same address: it makes way at once, and comes at a random moment.
TEST(Route, MakesWayAtOnceAndComesBackAtARandomMoment) {
    std::set<milliseconds> pauses;
    for (uint32_t seed = 0; seed < 200; ++seed) {
        Clocked node(seed);
        node.route.on_attached(node.now);
        node.now += 6s;
        ASSERT_TRUE(node.move(10s, ""));
        EXPECT_EQ(node.route.leave_at(), node.now);
        const auto end = node.route.on_end(node.now);
        ASSERT_TRUE(end.pause);
        EXPECT_GE(*end.pause, 0ms);
        EXPECT_LE(*end.pause, 10s);
        pauses.insert(*end.pause);
        EXPECT_EQ(node.dials(), "home:1");
    }
    EXPECT_GT(pauses.size(), 150u);
    EXPECT_GT(*pauses.rbegin() - *pauses.begin(), 8s);
}

// A relay may say what it likes: nobody is parked, and nobody runs in circles.
TEST(Route, NobodyIsParkedOrSentRoundInALoop) {
    Clocked node;
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(milliseconds(0xffffffff), ""));
    node.now += 6s;
    EXPECT_LE(*node.route.on_end(node.now).pause, Route::kAwayMax);

    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(milliseconds(0xffffffff), "ws://away:2"));
    EXPECT_LE(node.route.leave_at(), node.now + Route::kStayMax);
    // Cut long before it wanted to leave.
    EXPECT_LE(*node.route.on_end(node.now + 6s).pause, Route::kAwayMax);

    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(0ms, "ws://third:3"));
    EXPECT_EQ(node.route.on_end(node.now + 10ms).pause_or(100ms), 100ms);
}

TEST(Route, OnlyTheFirstMoveOfAConnectionCounts) {
    Clocked node;
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(10s, "ws://away:2"));
    const auto leave_at = node.route.leave_at();
    node.now += 1s;
    ASSERT_TRUE(node.move(3600s, "ws://third:3"));
    EXPECT_EQ(node.route.leave_at(), leave_at);
    (void)node.route.on_end(leave_at);
    EXPECT_EQ(node.dials(), "away:2");
    node.route.on_attached(leave_at);
    EXPECT_EQ(node.route.leave_at(), net::Deadline::max()) << "that was the other connection's";
}

TEST(Route, AnAddressThatFailsIsTriedInTurnWithTheConfiguredOne) {
    Clocked node;
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(0ms, "ws://away:2"));
    (void)node.route.on_end(node.now);
    EXPECT_EQ(node.dials(), "away:2");
    EXPECT_FALSE(node.route.at_home());
    node.route.on_failed();
    EXPECT_EQ(node.dials(), "home:1");
    EXPECT_TRUE(node.route.at_home());
    node.route.on_failed();
    EXPECT_EQ(node.dials(), "away:2") << "the configured one has stopped, after all";
    node.route.on_failed();
    node.route.on_attached(node.now);  // the configured one is back
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(node.dials(), "home:1");
        node.route.on_failed();
    }
}

TEST(Route, StaysWhereItWentUntilThatFails) {
    Clocked node;
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(0ms, "ws://away:2"));
    (void)node.route.on_end(node.now);
    node.route.on_attached(node.now);
    node.now += 6s;
    EXPECT_FALSE(node.route.on_end(node.now).pause) << "lost, not moved";
    EXPECT_EQ(node.dials(), "away:2");
    node.route.on_attached(node.now);
    EXPECT_FALSE(node.route.on_end(node.now + 1s).pause);
    EXPECT_EQ(node.dials(), "home:1") << "accepted and dropped at once is a failure";
}

// Everybody went, and the others have come home since: who is alone asks there, first after a
// while, then less and less.
TEST(Route, AsksAtHomeWhereNobodyIs) {
    std::set<net::Deadline> moments;
    for (uint32_t seed = 0; seed < 50; ++seed) {
        Clocked node(seed);
        node.route.on_attached(node.now);
        node.route.on_company(false, node.now);
        EXPECT_EQ(node.route.leave_at(), net::Deadline::max()) << "at home it waits";
        ASSERT_TRUE(node.move(0ms, "ws://away:2"));
        (void)node.route.on_end(node.now);
        milliseconds least = Route::kAloneFirst;
        for (int i = 0; i < 8; ++i) {
            node.route.on_attached(node.now);
            node.route.on_company(false, node.now);
            EXPECT_FALSE(node.route.relay_stops());
            const auto leave_at = node.route.leave_at();
            if (i == 0) moments.insert(leave_at);
            EXPECT_GE(leave_at, node.now + least);
            EXPECT_LE(leave_at, node.now + least * 3 / 2);
            node.now += 1s;
            node.route.on_company(false, node.now);
            EXPECT_EQ(node.route.leave_at(), leave_at) << "said again it changes nothing";
            node.now = leave_at;
            EXPECT_EQ(node.route.on_end(node.now).pause, 0ms);
            EXPECT_TRUE(node.route.at_home());
            node.route.on_failed();  // nobody at home
            EXPECT_EQ(node.dials(), "away:2");
            least = std::min(least * 2, Route::kAloneMax);
        }
        // With company it stays, and is as patient as at first when it has none again.
        node.route.on_attached(node.now);
        node.route.on_company(false, node.now);
        node.route.on_company(true, node.now);
        EXPECT_EQ(node.route.leave_at(), net::Deadline::max());
        node.route.on_company(false, node.now);
        EXPECT_LE(node.route.leave_at(), node.now + Route::kAloneFirst * 3 / 2);
        node.now = node.route.leave_at();
        (void)node.route.on_end(node.now);
        node.route.on_attached(node.now);  // home is back, and the only one again
        node.route.on_company(false, node.now);
        EXPECT_EQ(node.route.leave_at(), net::Deadline::max());
        node.route.on_failed();
        EXPECT_TRUE(node.route.at_home());
    }
    EXPECT_GT(moments.size(), 30u) << "a thousand nodes must not come at once";
}

// The others have as long to come as MOVE gave them.
TEST(Route, WaitsForThoseWhoMoveLater) {
    Clocked node;
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(600s, "ws://away:2"));
    const auto others_by = node.now + 600s;
    node.now = node.route.leave_at();
    (void)node.route.on_end(node.now);
    node.route.on_attached(node.now);
    node.route.on_company(false, node.now);
    EXPECT_GE(node.route.leave_at(), others_by + Route::kAloneFirst);
    EXPECT_LE(node.route.leave_at(), others_by + Route::kAloneFirst * 3 / 2);
    // One that comes first and goes again does not mean that all were there.
    node.route.on_company(true, node.now);
    node.route.on_company(false, node.now);
    EXPECT_GE(node.route.leave_at(), others_by + Route::kAloneFirst);
    // Cut off before, it is a lost connection as any.
    node.now += 6s;
    EXPECT_FALSE(node.route.on_end(node.now).pause);
    EXPECT_EQ(node.dials(), "away:2");
}

// Moved on from there: the same address is that one, and no longer the configured one.
TEST(Route, TheSameAddressIsTheOneThatIsAttachedTo) {
    Clocked node;
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(0ms, "ws://away:2"));
    (void)node.route.on_end(node.now);
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(10s, ""));
    EXPECT_EQ(node.route.leave_at(), node.now);
    (void)node.route.on_end(node.now);
    EXPECT_EQ(node.dials(), "away:2");
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(0ms, "ws://home:1"));
    (void)node.route.on_end(node.now);
    EXPECT_TRUE(node.route.at_home());
}

TEST(Route, AddressesThatAreOfNoUseLeadHome) {
    struct Case {
        const char* home;
        const char* url;
        Errc code;
    };
    const TlsFor any = [](const net::Endpoint&) { return net::TlsClient::make({}); };
    for (const auto& [home, url, code] : std::initializer_list<Case>{
             {"ws://home:1", "ws://away:99999", Errc::kUsage},
             {"ws://home:1", "ftp://away:2", Errc::kUsage},
             {"ws://home:1", "away", Errc::kUsage},
             {"wss://home:1", "ws://away:2", Errc::kDenied},  // the token would travel in the clear
         }) {
        Clocked node(1, home, any);
        node.route.on_attached(node.now);
        const Status moved = node.move(10s, url);
        ASSERT_FALSE(moved) << url;
        EXPECT_EQ(moved.error().code, code) << url;
        EXPECT_EQ(node.route.leave_at(), node.now) << "it stops all the same";
        EXPECT_TRUE(node.route.on_end(node.now).pause);
        EXPECT_EQ(node.dials(), "home:1") << url;
    }
    Clocked unable;
    unable.route.on_attached(unable.now);
    EXPECT_EQ(unable.move(10s, "wss://away:2").error().code, Errc::kDenied);
}

// The configured relay's pin is not another one's.
TEST(Route, AsksWhomToTrustElsewhere) {
    std::vector<std::string> asked;
    Clocked node(1, "wss://home:1", [&](const net::Endpoint& endpoint) {
        asked.push_back(to_string(endpoint));
        return net::TlsClient::make({});
    });
    node.route.on_attached(node.now);
    ASSERT_TRUE(node.move(0ms, "wss://away"));
    EXPECT_TRUE(asked.empty()) << "not in the middle of the work";
    (void)node.route.on_end(node.now);
    for (int i = 0; i < 2; ++i) {
        const auto relay = node.route.address();
        ASSERT_TRUE(relay);
        EXPECT_EQ(to_string(relay->endpoint), "away:443");
        EXPECT_NE(relay->tls, nullptr);
    }
    EXPECT_EQ(asked, std::vector<std::string>{"away:443"});
}

}  // namespace
}  // namespace kvasir::access
