#include "relay/turn_queue.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <map>
#include <vector>

namespace kvasir::relay {
namespace {

using std::chrono::milliseconds;

// Some connections that want a turn whenever they have had one.
struct Greedy {
    TurnQueue queue;
    std::map<uint64_t, TurnQueue::Account> accounts;
    std::map<uint64_t, uint64_t> served;  // cost

    void want(uint64_t id) { queue.add({id}, accounts[id]); }
    uint64_t turn(uint64_t cost, bool again = true) {
        const uint64_t id = queue.take().value;
        accounts[id] += cost;
        served[id] += cost;
        if (again) want(id);
        return id;
    }
};

RC_GTEST_PROP(TurnQueue, WhoAlwaysWantsGetsAnEqualShare, ()) {
    const auto count = *rc::gen::inRange<size_t>(2, 8);
    const auto costs =
        *rc::gen::container<std::vector<uint64_t>>(count, rc::gen::inRange<uint64_t>(1, 50000));
    Greedy all;
    for (uint64_t id = 0; id < costs.size(); ++id) all.want(id + 1);
    uint64_t largest = 0;
    for (const uint64_t cost : costs) largest = std::max(largest, cost);
    for (int i = 0; i < 2000; ++i) {
        const uint64_t next = all.turn(0, false);
        all.accounts[next] += costs[next - 1];
        all.served[next] += costs[next - 1];
        all.want(next);
        uint64_t least = ~uint64_t{0}, most = 0;
        for (uint64_t id = 1; id <= costs.size(); ++id) {
            least = std::min(least, all.served[id]);
            most = std::max(most, all.served[id]);
        }
        RC_ASSERT(most - least <= largest);
    }
}

// However many want all, and however long it said nothing: who comes now is next.
TEST(TurnQueue, WhoWantsLittleWaitsForTheTurnUnderWay) {
    Greedy all;
    for (uint64_t id = 1; id <= 20; ++id) all.want(id);
    for (int i = 0; i < 1000; ++i) all.turn(16384);
    for (int i = 0; i < 1000; ++i) {
        all.want(99);  // in the middle of a turn of somebody else
        ASSERT_EQ(all.turn(4096 + 4096, false), 99u) << i;
        for (int others = 0; others < 20; ++others) ASSERT_NE(all.turn(16384), 99u);
    }
}

// Nobody saves up turns by being idle.
TEST(TurnQueue, IdleTimeIsNotPaidBack) {
    Greedy all;
    all.want(1);
    for (int i = 0; i < 1000; ++i) all.turn(16384);
    all.want(2);
    for (int i = 0; i < 100; ++i) all.turn(16384);
    EXPECT_LE(all.served[2], 51u * 16384);
}

TEST(TurnQueue, AmongEqualsWhoCameFirst) {
    Greedy all;
    for (uint64_t id = 1; id <= 5; ++id) all.want(id);
    for (uint64_t id = 1; id <= 5; ++id) EXPECT_EQ(all.turn(1, false), id);
    EXPECT_TRUE(all.queue.empty());
}

TEST(Crowd, TwoAreNone) {
    Crowd crowd;
    Time now{std::chrono::seconds(1000)};
    for (int i = 0; i < 1000; ++i, now += milliseconds(1)) {
        crowd.note({i % 2 == 0 ? uint64_t{1} : uint64_t{2}}, now);
        ASSERT_FALSE(crowd.is_here(now));
    }
}

TEST(Crowd, AThirdIsOneForATenthOfASecond) {
    Crowd crowd;
    Time now{std::chrono::seconds(1000)};
    const auto two = [&](milliseconds time) {
        for (const Time end = now + time; now < end; now += milliseconds(1)) {
            crowd.note({1}, now);
            crowd.note({2}, now);
        }
    };
    two(milliseconds(50));
    crowd.note({3}, now);
    EXPECT_TRUE(crowd.is_here(now));
    two(milliseconds(90));
    EXPECT_TRUE(crowd.is_here(now));
    two(milliseconds(20));
    EXPECT_FALSE(crowd.is_here(now));
    // One that comes more often is one all the time.
    for (int i = 0; i < 20; ++i) {
        crowd.note({3}, now);
        two(milliseconds(50));
        ASSERT_TRUE(crowd.is_here(now));
    }
}

// A pair after another pair that has gone: no crowd.
TEST(Crowd, WhoWentIsForgotten) {
    Crowd crowd;
    const Time now{std::chrono::seconds(1000)};
    crowd.note({1}, now);
    crowd.note({2}, now);
    crowd.note({3}, now + milliseconds(101));
    crowd.note({4}, now + milliseconds(101));
    EXPECT_FALSE(crowd.is_here(now + milliseconds(101)));
}

}  // namespace
}  // namespace kvasir::relay
