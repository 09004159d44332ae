// The joining worker's rules in virtual time: a scripted market answers, hours pass at once.
#include "worker/agent_rules.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

namespace kvasir::worker {
namespace {

using namespace std::chrono_literals;
using Kind = AgentAction::Kind;

constexpr Segment kA{{0, 0}, 0, 4};
constexpr Segment kB{{1, 0}, 2, 6};

Error gone() {
    return {Errc::kIo, "connection refused"};
}

// Market, fetcher and worker of one node; every action is answered at once, unless told otherwise.
class World {
public:
    explicit World(AgentLimits limits = {}) : rules(limits, 7) {}

    void run(AgentTime time) {
        const AgentTime until = now + time;
        while (now < until && !ended) {
            deliver(event::Tick{});
            now = std::min(until, rules.wake_at(now));
        }
    }
    void deliver(const AgentEvent& event) {
        pending.push_back(event);
        while (!pending.empty() && !ended) {
            const AgentEvent next = pending.front();
            pending.erase(pending.begin());
            for (const AgentAction& action : rules.on_event(next, now)) act(action);
        }
    }
    void act(const AgentAction& action) {
        switch (action.kind) {
            case Kind::kCall:
                calls.push_back({now, action.step});
                ++count[static_cast<size_t>(action.step)];
                EXPECT_FALSE(in_call) << "one call at a time";
                return pending.push_back(answer(action));
            case Kind::kFetch:
                EXPECT_FALSE(fetching);
                fetching = true;
                ++fetches;
                if (fetch_result) {
                    fetching = false;
                    if (*fetch_result) {
                        pending.push_back(event::Fetched{});
                    } else {
                        pending.push_back(event::Failed{AgentStep::kFetch, fetch_result->error()});
                    }
                }
                return;
            case Kind::kCancelFetch:
                EXPECT_TRUE(fetching);
                fetching = false;
                ++cancels;
                return pending.push_back(event::Failed{AgentStep::kFetch, {Errc::kClosed, ""}});
            case Kind::kServe:
                EXPECT_TRUE(serving.empty());
                serving = action.segments;
                ++serves;
                return pending.push_back(event::AttachAsked{});
            case Kind::kStopServing:
                EXPECT_FALSE(serving.empty());
                serving.clear();
                attached = false;
                ++stops;
                return pending.push_back(event::WorkerEnded{});
            case Kind::kAllowAttach:
                attached = true;
                ++attaches;
                return;
            case Kind::kShowToken:
                ++tokens_shown;
                return;
            case Kind::kEnd:
                ended = true;
                end = action.status;
                return;
        }
    }
    AgentEvent answer(const AgentAction& action) {
        if (is_gone) return event::Failed{action.step, gone()};
        const auto refused = refusals.find(action.step);
        if (refused != refusals.end()) return event::Failed{action.step, refused->second};
        switch (action.step) {
            case AgentStep::kLookUp:
                return event::Seen{outline};
            case AgentStep::kEnroll:
                is_known = true;
                return event::Granted{3600s, 2700s};
            case AgentStep::kRenew:
                if (!is_known)
                    return event::Failed{AgentStep::kRenew, {Errc::kNotFound, "unknown"}};
                return event::Granted{3600s, 2700s};
            case AgentStep::kLease:
                return event::Leased{leases, 20s};
            case AgentStep::kProgress:
                return event::Progressed{news(action.ids)};
            case AgentStep::kProve:
                proved = action.ids;
                return event::Proved{news(action.ids)};
            case AgentStep::kBeat:
                last_beat = now;
                return event::Beaten{news(action.ids), std::nullopt, false};
            case AgentStep::kRelease:
                ++releases;
                return event::Released{};
            default:
                ADD_FAILURE() << "not a call";
                return event::Tick{};
        }
    }
    LeaseNews news(const std::vector<uint64_t>& ids) const {
        LeaseNews out;
        for (const uint64_t id : ids) {
            const bool is_there = std::ranges::any_of(
                leases, [id](const NodeLease& lease) { return lease.id == id; });
            if (is_there) {
                out.leases.push_back({id, 60s});
            } else {
                out.lost.push_back(id);
            }
        }
        return out;
    }
    uint64_t calls_of(AgentStep step) const { return count[static_cast<size_t>(step)]; }

    AgentRules rules;
    AgentTime now{1'000'000};
    std::vector<AgentEvent> pending;
    // The market.
    bool is_gone = false;
    bool is_known = false;
    bool in_call = false;
    Sha256 outline = {1};
    std::vector<NodeLease> leases = {{11, kA, 400, 60s}, {12, kB, 400, 60s}};
    std::map<AgentStep, Error> refusals;
    AgentTime last_beat{0};
    std::vector<uint64_t> proved;
    int releases = 0;
    // The node.
    std::optional<Status> fetch_result = Status();
    bool fetching = false;
    std::vector<Segment> serving;
    bool attached = false;
    int fetches = 0, cancels = 0, serves = 0, stops = 0, attaches = 0, tokens_shown = 0;
    bool ended = false;
    Status end;
    std::vector<std::pair<AgentTime, AgentStep>> calls;
    std::array<uint64_t, static_cast<size_t>(AgentStep::kCount_)> count = {};
};

uint64_t most_calls_in_a_minute(const World& world) {
    uint64_t most = 0;
    for (size_t begin = 0, i = 0; i < world.calls.size(); ++i) {
        while (world.calls[i].first - world.calls[begin].first >= 60s) ++begin;
        most = std::max<uint64_t>(most, i - begin + 1);
    }
    return most;
}

TEST(AgentRules, JoinsInOrderAndServes) {
    World world;
    world.run(1s);
    EXPECT_EQ(world.rules.state(), AgentState::kServing);
    EXPECT_EQ(world.serving, (std::vector<Segment>{kA, kB}));
    EXPECT_TRUE(world.attached);
    std::vector<AgentStep> steps;
    for (const auto& [time, step] : world.calls) steps.push_back(step);
    EXPECT_EQ(steps,
              (std::vector<AgentStep>{AgentStep::kLookUp, AgentStep::kRenew, AgentStep::kEnroll,
                                      AgentStep::kLease, AgentStep::kProve}));
    EXPECT_EQ(world.proved, (std::vector<uint64_t>{11, 12}));
}

TEST(AgentRules, AKnownNodeDoesNotUseItsInviteAgain) {
    World world;
    world.is_known = true;
    world.run(1s);
    EXPECT_EQ(world.rules.state(), AgentState::kServing);
    EXPECT_EQ(world.calls_of(AgentStep::kEnroll), 0u);
}

TEST(AgentRules, ADayOfServingIsHeartbeatsAndRenewals) {
    World world;
    world.run(24h);
    EXPECT_EQ(world.serves, 1);
    EXPECT_EQ(world.stops, 0);
    EXPECT_EQ(world.fetches, 1);
    EXPECT_NEAR(static_cast<double>(world.calls_of(AgentStep::kBeat)), 86400 / 20.0, 50);
    EXPECT_NEAR(static_cast<double>(world.calls_of(AgentStep::kRenew)), 86400 / 2700.0, 3);
    EXPECT_EQ(static_cast<uint64_t>(world.tokens_shown),
              world.calls_of(AgentStep::kRenew) - 1);  // the first was before the worker
    EXPECT_LE(most_calls_in_a_minute(world), 10u);
}

// 700 s asleep: the leases are asked for before a connection is made, and what was lost is leased
// again; the slice is not fetched again.
TEST(AgentRules, AfterASleepTheMarketIsAskedBeforeAttaching) {
    World world;
    world.run(30s);
    ASSERT_TRUE(world.attached);
    const AgentTime before = world.last_beat;
    world.now += 700s;
    world.attached = false;
    world.leases = {{21, kA, 400, 60s}, {22, kB, 400, 60s}};  // the old ones have expired
    const uint64_t leased = world.calls_of(AgentStep::kLease);
    // The worker notices by itself, and asks before it dials.
    bool was_checked = false;
    for (const AgentAction& action : world.rules.on_event(event::AttachAsked{}, world.now)) {
        EXPECT_NE(action.kind, Kind::kAllowAttach) << "unchecked after a sleep";
        was_checked = was_checked || action.step == AgentStep::kBeat;
        world.act(action);
    }
    EXPECT_TRUE(was_checked);
    world.run(5s);
    EXPECT_GT(world.last_beat, before);
    EXPECT_EQ(world.calls_of(AgentStep::kLease), leased + 1);
    EXPECT_EQ(world.proved, (std::vector<uint64_t>{21, 22}));
    EXPECT_TRUE(world.attached);
    EXPECT_EQ(world.fetches, 1);
    EXPECT_EQ(world.stops, 0);
}

// W6: a phone that is awake for 5 s and asleep for 60 s, all day. Its leases run out each time; it
// asks for them before it dials, works, and fetches nothing again.
TEST(AgentRules, FiveSecondsAwakeAndSixtyAsleepIsWorkEachTime) {
    World world;
    world.run(5s);
    ASSERT_TRUE(world.attached);
    constexpr int kCycles = 24 * 3600 / 65;
    int worked = 0;
    for (int cycle = 1; cycle <= kCycles; ++cycle) {
        world.now += 60s;
        world.attached = false;
        const uint64_t id = 100 + 2 * static_cast<uint64_t>(cycle);
        world.leases = {{id, kA, 400, 60s}, {id + 1, kB, 400, 60s}};
        world.deliver(event::AttachAsked{});
        world.run(5s);
        ASSERT_FALSE(world.ended);
        // Only what is its own now is served.
        const bool is_leased = world.proved == std::vector<uint64_t>{id, id + 1};
        worked += world.attached && is_leased ? 1 : 0;
    }
    EXPECT_EQ(worked, kCycles);
    EXPECT_EQ(world.fetches, 1);
    EXPECT_EQ(world.serves, 1);
    EXPECT_EQ(world.stops, 0);
    EXPECT_LE(most_calls_in_a_minute(world), 10u);
}

TEST(AgentRules, ASleepBeyondTheTokensLifeRenewsItFirst) {
    World world;
    world.run(30s);
    world.now += 2h;
    world.attached = false;
    const size_t before = world.calls.size();
    world.deliver(event::AttachAsked{});
    world.run(5s);
    ASSERT_GT(world.calls.size(), before);
    EXPECT_EQ(world.calls[before].second, AgentStep::kRenew);
    EXPECT_TRUE(world.attached);
}

// No event carries a wall clock, so one that jumps by a day can only show through `now`; and that
// is the time since boot. What is left to show: time that stands still or repeats harms nothing.
TEST(AgentRules, TimeThatDoesNotAdvanceMakesNoCalls) {
    World world;
    world.run(30s);
    const size_t before = world.calls.size();
    for (int i = 0; i < 10000; ++i) world.deliver(event::Tick{});
    EXPECT_LE(world.calls.size(), before + 1);
    EXPECT_EQ(world.stops, 0);
}

TEST(AgentRules, AMarketGoneForAnHourChangesNothingAboutServing) {
    World world;
    world.run(60s);
    world.is_gone = true;
    const size_t before = world.calls.size();
    world.run(1h);
    EXPECT_EQ(world.rules.state(), AgentState::kServing);
    EXPECT_EQ(world.stops, 0);
    EXPECT_LE(world.calls.size() - before, 200u) << "bounded attempts";
    EXPECT_GE(world.calls.size() - before, 30u) << "but it goes on trying";
    // The market restarts with an empty book: leases of the same segments with other ids.
    world.is_gone = false;
    world.leases = {{31, kA, 400, 60s}, {32, kB, 400, 60s}};
    world.run(3min);
    EXPECT_EQ(world.rules.state(), AgentState::kServing);
    EXPECT_EQ(world.proved, (std::vector<uint64_t>{31, 32}));
    EXPECT_EQ(world.stops, 0);
    EXPECT_EQ(world.fetches, 1);
    const AgentTime beat = world.last_beat;
    world.run(1min);
    EXPECT_GT(world.last_beat, beat);
}

TEST(AgentRules, ARelayIsNotKeptWaitingForADeadMarket) {
    World world;
    world.run(60s);
    world.is_gone = true;
    world.run(120s);
    world.attached = false;
    world.deliver(event::AttachAsked{});
    world.run(2min);
    EXPECT_TRUE(world.attached);
}

// L4: "revoked" stops retries.
TEST(AgentRules, ARevokedNodeStopsAtOnceWithTheReason) {
    for (const AgentStep step : {AgentStep::kBeat, AgentStep::kRenew}) {
        World world;
        world.run(30s);
        world.refusals[step] = {Errc::kRevoked, "revoked by the operator"};
        world.run(2h);
        EXPECT_TRUE(world.ended);
        ASSERT_FALSE(world.end);
        EXPECT_EQ(world.end.error().code, Errc::kRevoked);
        EXPECT_EQ(world.stops, 1);
        EXPECT_TRUE(world.serving.empty());
    }
    World told_by_the_relay;
    told_by_the_relay.run(30s);
    told_by_the_relay.serving.clear();
    told_by_the_relay.deliver(event::WorkerEnded{tl::unexpected(Error{Errc::kRevoked, "revoked"})});
    EXPECT_TRUE(told_by_the_relay.ended);
    EXPECT_EQ(told_by_the_relay.end.error().code, Errc::kRevoked);
}

// L4: "expired" is renewed, and work goes on.
TEST(AgentRules, AnExpiredTokenIsRenewedAndTheWorkerStartedAgain) {
    World world;
    world.run(30s);
    world.serving.clear();
    const uint64_t before = world.calls_of(AgentStep::kRenew);
    world.deliver(event::WorkerEnded{tl::unexpected(Error{Errc::kExpired, "token expired"})});
    EXPECT_EQ(world.calls_of(AgentStep::kRenew), before + 1);
    world.run(5s);
    EXPECT_EQ(world.serves, 2);
    EXPECT_TRUE(world.attached);
}

TEST(AgentRules, ARefusedTokenIsRenewedButNotInACircle) {
    World world;
    world.run(30s);
    world.refusals[AgentStep::kBeat] = {Errc::kDenied, "not this token"};
    const size_t before = world.calls.size();
    world.run(10min);
    EXPECT_FALSE(world.ended);
    EXPECT_GT(world.calls_of(AgentStep::kRenew), 2u);
    EXPECT_LT(world.calls.size() - before, 100u);
}

TEST(AgentRules, AWrongInviteEnds) {
    World world;
    world.refusals[AgentStep::kEnroll] = {Errc::kDenied, "this invite code is used up"};
    world.run(10s);
    EXPECT_TRUE(world.ended);
    ASSERT_FALSE(world.end);
    EXPECT_EQ(world.end.error().code, Errc::kDenied);
    EXPECT_EQ(world.calls_of(AgentStep::kEnroll), 1u);
}

TEST(AgentRules, AManInTheMiddleAtTheStartEndsAndLaterChangesNothing) {
    World first;
    first.refusals[AgentStep::kLookUp] = {Errc::kDenied, "another key"};
    first.run(10s);
    EXPECT_TRUE(first.ended);
    EXPECT_FALSE(first.end);
    World later;
    later.run(30s);
    later.is_gone = true;
    later.run(60s);
    later.is_gone = false;
    later.refusals[AgentStep::kLookUp] = {Errc::kDenied, "another key"};
    later.run(10min);
    EXPECT_FALSE(later.ended);
    EXPECT_EQ(later.rules.state(), AgentState::kServing);
}

TEST(AgentRules, StopDrainsThenReleasesThenEndsWell) {
    World world;
    world.run(30s);
    world.deliver(event::StopAsked{});
    EXPECT_TRUE(world.ended);
    EXPECT_TRUE(world.end);
    EXPECT_EQ(world.stops, 1);
    EXPECT_EQ(world.releases, 1);
    World without_market;
    without_market.run(30s);
    without_market.is_gone = true;
    without_market.deliver(event::StopAsked{});
    EXPECT_TRUE(without_market.ended);
    EXPECT_TRUE(without_market.end);
}

TEST(AgentRules, StopWhileFetchingCancelsAndReleases) {
    World world;
    world.fetch_result.reset();
    world.run(30s);
    ASSERT_TRUE(world.fetching);
    EXPECT_GE(world.calls_of(AgentStep::kProgress), 2u);
    world.deliver(event::StopAsked{});
    EXPECT_EQ(world.cancels, 1);
    EXPECT_EQ(world.releases, 1);
    EXPECT_TRUE(world.ended);
    EXPECT_TRUE(world.end);
}

TEST(AgentRules, AFullDiskIsAStateAndRetriedSlowly) {
    World world;
    world.fetch_result = tl::unexpected(Error{Errc::kNoSpace, "the disk is full"});
    world.run(1h);
    EXPECT_FALSE(world.ended);
    EXPECT_EQ(world.rules.state(), AgentState::kDiskFull);
    EXPECT_GE(world.fetches, 5);
    EXPECT_LE(world.fetches, 20);
    world.fetch_result = Status();
    world.run(20min);
    EXPECT_EQ(world.rules.state(), AgentState::kServing);
}

TEST(AgentRules, AFailedFetchIsTriedAgainWithPausesAndFreshLeases) {
    World world;
    world.fetch_result = tl::unexpected(Error{Errc::kTimeout, "stalled"});
    world.run(1h);
    EXPECT_GE(world.fetches, 10);
    EXPECT_LE(world.fetches, 40);
    EXPECT_GE(world.calls_of(AgentStep::kLease), static_cast<uint64_t>(world.fetches) - 1);
}

// The plan is void when the file changed: the market is looked up again, and another model means
// another slice; the old one is not served a moment longer than its drain.
TEST(AgentRules, AnotherModelAtTheMarketReplacesSliceAndWorker) {
    World world;
    world.run(60s);
    world.is_gone = true;
    world.run(30s);
    world.is_gone = false;
    world.outline = {2};
    world.leases = {{41, kA, 500, 60s}, {42, kB, 500, 60s}};
    world.run(3min);
    EXPECT_EQ(world.fetches, 2);
    EXPECT_EQ(world.stops, 1);
    EXPECT_EQ(world.serves, 2);
    EXPECT_EQ(world.proved, (std::vector<uint64_t>{41, 42}));
    EXPECT_TRUE(world.attached);
}

TEST(AgentRules, BytesThatChangedWhileFetchingMakeTheMarketBeLookedUp) {
    World world;
    world.fetch_result = tl::unexpected(Error{Errc::kMismatch, "the file changed"});
    world.run(5s);
    const uint64_t before = world.calls_of(AgentStep::kLookUp);
    EXPECT_GE(before, 2u);
    world.outline = {2};
    world.fetch_result = Status();
    world.run(2min);
    EXPECT_EQ(world.rules.state(), AgentState::kServing);
}

TEST(AgentRules, LostLeasesShrinkWhatIsServed) {
    World world;
    world.run(30s);
    world.leases = {{11, kA, 400, 60s}};  // 12 was given away
    world.run(1min);
    EXPECT_EQ(world.serving, std::vector<Segment>{kA});
    EXPECT_EQ(world.fetches, 2);  // copies from the larger slice
    EXPECT_EQ(world.stops, 1);
    world.leases.clear();
    world.run(1min);
    EXPECT_TRUE(world.serving.empty());
    EXPECT_EQ(world.rules.state(), AgentState::kWaiting);
    world.leases = {{13, kB, 400, 60s}};
    world.run(3min);
    EXPECT_EQ(world.serving, std::vector<Segment>{kB});
}

TEST(AgentRules, AWrongProofChecksTheSliceAgain) {
    World world;
    world.refusals[AgentStep::kProve] = {Errc::kMismatch, "bytes differ"};
    world.run(5s);
    EXPECT_GE(world.fetches, 2);
    EXPECT_EQ(world.serves, 0);
    world.refusals.clear();
    world.run(5min);
    EXPECT_EQ(world.rules.state(), AgentState::kServing);
}

// Whatever a market answers, the calls of a minute are bounded, and so is the memory of failures.
TEST(AgentRules, HostileMarketsCannotMakeItBusy) {
    const std::vector<Errc> codes = {Errc::kNotHeld,  Errc::kExpired,  Errc::kDenied,  Errc::kBusy,
                                     Errc::kMismatch, Errc::kNotFound, Errc::kProtocol};
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
        World world;
        world.run(30s);
        for (int i = 0; i < 20; ++i) {
            world.refusals.clear();
            for (const AgentStep step : {AgentStep::kLookUp, AgentStep::kRenew, AgentStep::kLease,
                                         AgentStep::kProve, AgentStep::kBeat}) {
                if (random() % 2 == 0)
                    world.refusals[step] = {codes[random() % codes.size()], "no"};
            }
            if (random() % 3 == 0) world.leases[0].id += 100;
            world.run(AgentTime(random() % 120000));
            if (world.ended) break;
        }
        EXPECT_LE(most_calls_in_a_minute(world), 125u);
        if (world.ended) continue;
        world.refusals.clear();
        world.run(10min);
        EXPECT_EQ(world.rules.state(), AgentState::kServing) << "round " << round;
    }
}

}  // namespace
}  // namespace kvasir::worker
