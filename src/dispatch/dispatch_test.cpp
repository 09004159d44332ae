#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>

#include "dispatch/health.hpp"
#include "dispatch/planner.hpp"

namespace kvasir::dispatch {
namespace {

using namespace std::chrono_literals;

TEST(Planner, WhatNobodyHoldsStaysOnTheBackbone) {
    const std::vector<uint32_t> holders = {0};
    const std::vector<uint32_t> unknown = {7};
    const Group groups[] = {{1, {}}, {1, holders}, {1, unknown}};
    const HolderCost costs[] = {{}};
    EXPECT_EQ(plan(groups, costs), (std::vector<int32_t>{kBackbone, 0, kBackbone}));
}

TEST(Planner, UnusableHoldersGetNothing) {
    const std::vector<uint32_t> holders = {0, 1};
    const Group groups[] = {{1, holders}, {1, holders}};
    const HolderCost costs[] = {{100, 10, 0, false}, {100, 1000, 0, true}};
    EXPECT_EQ(plan(groups, costs), (std::vector<int32_t>{1, 1}));
}

TEST(Planner, FewPairsTouchOneWorkerManyAreSpread) {
    const std::vector<uint32_t> holders = {0, 1};
    const HolderCost costs[] = {{1000, 10, 0, true}, {1000, 10, 0, true}};
    std::vector<Group> few(4, Group{1, holders});
    EXPECT_EQ(plan(few, costs), (std::vector<int32_t>{0, 0, 0, 0}));
    std::vector<Group> many(8, Group{100, holders});
    const auto spread = plan(many, costs);
    EXPECT_EQ(std::count(spread.begin(), spread.end(), 0), 4);
    EXPECT_EQ(std::count(spread.begin(), spread.end(), 1), 4);
}

RC_GTEST_PROP(Planner, AssignsOnlyToUsableHoldersAndNeverSkipsOne, ()) {
    const auto workers = *rc::gen::inRange<uint32_t>(1, 6);
    std::vector<HolderCost> costs(workers);
    for (auto& cost : costs)
        cost = {*rc::gen::inRange(1, 500) * 1.0, *rc::gen::inRange(1, 900) * 1.0, 0,
                *rc::gen::arbitrary<bool>()};
    const auto count = *rc::gen::inRange<size_t>(0, 40);
    std::vector<std::vector<uint32_t>> holders(count);
    std::vector<Group> groups(count);
    for (size_t i = 0; i < count; ++i) {
        for (uint32_t w = 0; w < workers; ++w)
            if (*rc::gen::arbitrary<bool>()) holders[i].push_back(w);
        groups[i] = {*rc::gen::inRange<uint32_t>(1, 64), holders[i]};
    }
    const auto result = plan(groups, costs);
    RC_ASSERT(result.size() == count);
    for (size_t i = 0; i < count; ++i) {
        const bool possible = std::any_of(holders[i].begin(), holders[i].end(),
                                          [&](uint32_t w) { return costs[w].usable; });
        RC_ASSERT((result[i] != kBackbone) == possible);
        if (possible) {
            RC_ASSERT(costs[static_cast<size_t>(result[i])].usable);
            RC_ASSERT(std::find(holders[i].begin(), holders[i].end(),
                                static_cast<uint32_t>(result[i])) != holders[i].end());
        }
    }
}

TEST(Health, FailsDownAtOnceAndRecoversAfterPauseAndPong) {
    Health health;
    const TimePoint t0{};
    EXPECT_TRUE(health.usable());
    health.on_failure(t0);
    EXPECT_FALSE(health.usable());
    EXPECT_FALSE(health.wants_probe(t0 + 100ms));
    health.on_pong(t0 + 100ms);
    EXPECT_FALSE(health.usable()) << "a pong within the pause is not enough";
    EXPECT_TRUE(health.wants_probe(t0 + 200ms));
    health.on_pong(t0 + 200ms);
    EXPECT_TRUE(health.usable());
    health.on_failure(t0 + 300ms);
    health.on_pong(t0 + 300ms + 200ms);
    EXPECT_FALSE(health.usable()) << "the pause grows";
    health.on_pong(t0 + 300ms + 400ms);
    EXPECT_TRUE(health.usable());
}

TEST(Health, PauseIsBounded) {
    Health health;
    TimePoint now{};
    for (int i = 0; i < 100; ++i) health.on_failure(now);
    EXPECT_TRUE(health.wants_probe(now + 10s));
}

TEST(Health, DeadlineFollowsMeasurementWithinItsBounds) {
    Health health;
    EXPECT_EQ(health.deadline(8), 400ms) << "nothing measured yet";
    for (int i = 0; i < 100; ++i) health.on_answer(8, 1ms, 900us);
    EXPECT_EQ(health.deadline(8), 150ms);
    for (int i = 0; i < 100; ++i) health.on_answer(8, 30ms, 24ms);
    EXPECT_GT(health.deadline(8), 150ms);
    EXPECT_LE(health.deadline(8), 400ms);
    EXPECT_GT(health.deadline(1000), 10s) << "a large request may take its time";
}

}  // namespace
}  // namespace kvasir::dispatch
