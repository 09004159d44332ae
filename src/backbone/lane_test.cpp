// Lanes against workers that behave in every way they can: the bits are always those of the local
// result.
#include <gtest/gtest.h>

#include <sys/eventfd.h>

#include <atomic>
#include <thread>

#include "backbone/swarm_testing.hpp"
#include "base/log_testing.hpp"

namespace kvasir::backbone::testing {
namespace {

WorkerReport find(const Report& report, const std::string& name) {
    for (const WorkerReport& worker : report.workers) {
        if (worker.id.starts_with(name)) return worker;
    }
    return {};
}

struct Behaviour {
    const char* name;
    Mood mood;
    bool retried;  // pairs are asked again elsewhere
    bool closed;   // the backbone ends the connection (or the worker did)
};
void PrintTo(const Behaviour& behaviour, std::ostream* out) {
    *out << behaviour.name;
}

// The relay's thread is always at it: the lane waits for its worker, and does not spin.
TEST(Lane, ABusyRelayInThisProcessIsLeftToItsThread) {
    const net::UniqueFd always(::eventfd(1, EFD_CLOEXEC));
    std::atomic<uint32_t> asked{0};
    UplinkOptions relay;
    relay.endpoint.host = "127.0.0.1";
    relay.endpoint.port = 1;  // nobody is there
    relay.credentials = [] { return access::Credentials{}; };
    relay.here = RelayHere{always.get(), [&] {
                               ++asked;
                               return false;
                           }};
    ToySwarm swarm(true, 150ms, {relay});
    auto worker = swarm.worker(0, 8, "silent");
    ASSERT_TRUE(swarm.covered());
    auto lane = swarm.backbone().open_lane();
    const auto first = swarm.check(*lane, kLayer0, ToySwarm::all_experts(), kToyUsed, 1);
    EXPECT_TRUE(first.computed && first.same_bits);
    EXPECT_GT(asked.load(), 0u) << "asked once a request was sent";
    worker->set_mood(Mood::kNever);
    const auto outcome = swarm.check(*lane, kLayer1, ToySwarm::all_experts(), kToyUsed, 2);
    EXPECT_TRUE(outcome.computed && outcome.same_bits);
    EXPECT_LE(asked.load(), 10u) << "in a wait of 150 ms";
}

// W1: it dies before, halfway through or after its answer, by a reset or a clean close, or says
// nothing: a retry, and nobody else notices.
class BadWorker : public ::testing::TestWithParam<Behaviour> {};

TEST_P(BadWorker, CostsARetryAndNeverABit) {
    ToySwarm swarm;
    auto healthy = swarm.worker(0, 4, "healthy");
    auto liar = swarm.worker(4, 8, "liar");
    ASSERT_TRUE(swarm.covered());
    auto lane = swarm.backbone().open_lane();
    const auto first = swarm.check(*lane, kLayer0, ToySwarm::all_experts(), kToyUsed, 1);
    EXPECT_TRUE(first.computed && first.same_bits);
    swarm.backbone().reset_report();

    liar->set_mood(GetParam().mood);
    const auto outcome = swarm.check(*lane, kLayer1, ToySwarm::all_experts(), kToyUsed, 2);
    EXPECT_TRUE(outcome.computed && outcome.same_bits);
    EXPECT_LT(outcome.took, 3000ms);
    EXPECT_EQ(swarm.backbone().report().retries > 0, GetParam().retried);
    if (GetParam().closed) {
        EXPECT_TRUE(eventually([&] { return !find(swarm.backbone().report(), "liar").connected; }));
    } else {
        EXPECT_TRUE(find(swarm.backbone().report(), "liar").connected);
    }
    // The healthy one goes on, and what the other held is computed by somebody.
    for (uint64_t i = 0; i < 4; ++i) {
        const auto next = swarm.check(*lane, i % 2 ? kLayer1 : kLayer0, ToySwarm::all_experts(),
                                      kToyUsed, 10 + i);
        EXPECT_TRUE(next.computed && next.same_bits) << i;
    }
    EXPECT_TRUE(find(swarm.backbone().report(), "healthy").connected);
    EXPECT_TRUE(swarm.backbone().report().exact);
}

constexpr Behaviour kBehaviours[] = {
    {"Late", Mood::kLate, true, false},
    {"Never", Mood::kNever, true, false},
    {"OnlyPings", Mood::kOnlyPings, true, false},
    {"Twice", Mood::kTwice, false, true},
    {"Nan", Mood::kNan, true, true},
    {"Infinity", Mood::kInfinity, true, true},
    {"WrongWidth", Mood::kWrongWidth, true, true},
    {"WrongCount", Mood::kWrongCount, true, true},
    {"Short", Mood::kShort, true, true},
    {"DiesBefore", Mood::kDiesBefore, true, true},
    {"Fin", Mood::kFin, true, true},
    {"Error", Mood::kError, true, false},
    {"GivesUp", Mood::kGivesUp, true, true},
    {"PingFlood", Mood::kPingFlood, true, true},
    {"PongFlood", Mood::kPongFlood, true, true},
    {"UnknownFrame", Mood::kUnknownFrame, true, true},
    {"Unasked", Mood::kUnasked, true, true},
    {"ProgramAck", Mood::kProgramAck, true, false},
    {"Text", Mood::kText, true, true},
};
INSTANTIATE_TEST_SUITE_P(Moods, BadWorker, ::testing::ValuesIn(kBehaviours),
                         [](const ::testing::TestParamInfo<Behaviour>& p) {
                             return std::string(p.param.name);
                         });

// The operator reads why another was asked, in the words that the worker gets.
TEST(BadWorkers, ValuesThatAreNoNumbersAreNamedInTheLog) {
    for (const Mood mood : {Mood::kNan, Mood::kInfinity}) {
        ToySwarm swarm;
        auto liar = swarm.worker(0, 8, "liar");
        ASSERT_TRUE(swarm.covered());
        auto lane = swarm.backbone().open_lane();
        const kvasir::testing::LogCapture lines;
        liar->set_mood(mood);
        const auto outcome = swarm.check(*lane, kLayer0, ToySwarm::all_experts(), kToyUsed, 1);
        EXPECT_TRUE(outcome.computed && outcome.same_bits);
        const auto told = lines.with("asking elsewhere");
        ASSERT_EQ(told.size(), 1u);
        EXPECT_NE(told[0].find(": answered with values that are not numbers; asking elsewhere"),
                  std::string::npos)
            << told[0];
    }
}

// A reset may overtake the answer or not: both are right.
TEST(Churn, AResetDuringOrAfterTheAnswerNeverCostsABit) {
    for (const Mood mood : {Mood::kDiesHalfway, Mood::kDiesAfter}) {
        ToySwarm swarm;
        auto healthy = swarm.worker(0, 4, "healthy");
        auto liar = swarm.worker(4, 8, "liar");
        ASSERT_TRUE(swarm.covered());
        auto lane = swarm.backbone().open_lane();
        liar->set_mood(mood);
        for (uint64_t i = 0; i < 4; ++i) {
            const auto outcome = swarm.check(*lane, kLayer0, ToySwarm::all_experts(), kToyUsed, i);
            EXPECT_TRUE(outcome.computed && outcome.same_bits) << i;
        }
        EXPECT_TRUE(eventually([&] { return !find(swarm.backbone().report(), "liar").connected; }));
    }
}

TEST(Churn, AnotherHolderIsAskedBeforeTheBackboneComputes) {
    ToySwarm swarm;
    auto one = swarm.worker(0, 8, "one");
    auto two = swarm.worker(0, 8, "two");
    ASSERT_TRUE(eventually(
        [&] { return swarm.covered() && one->computes() >= 4 && two->computes() >= 4; }));
    auto lane = swarm.backbone().open_lane();
    one->set_mood(Mood::kError);
    two->set_mood(Mood::kError);
    const auto outcome = swarm.check(*lane, kLayer0, ToySwarm::all_experts(), kToyUsed, 1);
    EXPECT_TRUE(outcome.computed && outcome.same_bits);
    const Report report = swarm.backbone().report();
    EXPECT_EQ(report.pairs_local, 8u);
    EXPECT_EQ(report.pairs_remote, 0u);
    EXPECT_GE(report.retries, 8u);
}

// M7: nobody holds expert 5. Then its holder of another expert leaves between two layers.
TEST(Coverage, WhatNobodyHoldsIsComputedHere) {
    ToySwarm swarm;
    auto low = swarm.worker(0, 5, "low");
    auto high = swarm.worker(6, 8, "high");
    ASSERT_TRUE(swarm.covered(7.0 / 8));
    EXPECT_FALSE(swarm.backbone().wait_coverage(1, 20ms));
    const auto missing = swarm.backbone().wait_coverage(1, 1ms);
    EXPECT_NE(missing.error().detail.find("0:5-5"), std::string::npos) << missing.error().detail;
    auto lane = swarm.backbone().open_lane();
    const auto with = swarm.check(*lane, kLayer0, {5, 0, 5, 7, 1, 2}, 2, 1);
    EXPECT_TRUE(with.computed && with.same_bits);
    EXPECT_EQ(swarm.backbone().report().pairs_local, 2u);
    EXPECT_EQ(swarm.backbone().report().pairs_remote, 4u);
    const auto without = swarm.check(*lane, kLayer1, {0, 7}, 2, 2);
    EXPECT_TRUE(without.computed && without.same_bits);
    EXPECT_EQ(swarm.backbone().report().pairs_local, 2u);
    high.reset();  // between two layers
    const auto after = swarm.check(*lane, kLayer0, {0, 7, 6, 5}, 2, 3);
    EXPECT_TRUE(after.computed && after.same_bits);
    EXPECT_TRUE(eventually([&] { return swarm.backbone().coverage() < 0.7; }));
    // Only experts that nobody holds any more: the kernels compute all of it here.
    const backbone::Report before = swarm.backbone().report();
    const auto here = swarm.check(*lane, kLayer1, {5, 7}, 2, 4);
    EXPECT_TRUE(here.computed && here.same_bits);
    EXPECT_EQ(swarm.backbone().report().pairs_local, before.pairs_local + 2);
    EXPECT_EQ(swarm.backbone().report().pairs_remote, before.pairs_remote);
    EXPECT_EQ(swarm.backbone().report().layers, before.layers);
}

// B5 and B2: a warm-up selects every expert; a batch may have no pairs at all.
TEST(Batches, WarmUpAndNothingSendNoFrames) {
    ToySwarm swarm;
    auto worker = swarm.worker(0, 8);
    ASSERT_TRUE(swarm.covered());
    auto lane = swarm.backbone().open_lane();
    const uint64_t before = worker->computes();
    EXPECT_FALSE(swarm.check(*lane, kLayer0, {0, 1, 2, 3, 4, 5, 6, 7}, kToyExperts, 1).computed);
    LayerBatch empty;
    empty.layer = kLayer0;
    EXPECT_TRUE(lane->compute(empty).value());
    const Report report = swarm.backbone().report();
    EXPECT_EQ(report.pairs_remote, 0u);
    EXPECT_EQ(report.layers, 0u);
    EXPECT_EQ(worker->computes(), before);
    // Other widths than the model's k are work as any other.
    EXPECT_TRUE(swarm.check(*lane, kLayer0, {0, 1, 2}, 3, 2).same_bits);
    EXPECT_TRUE(swarm.check(*lane, kLayer0, {3}, 1, 3).same_bits);
    EXPECT_EQ(worker->computes(), before + 2);
}

TEST(Batches, AnotherProgramOrOtherWeightsStayLocal) {
    ToySwarm swarm;
    auto worker = swarm.worker(0, 8);
    ASSERT_TRUE(swarm.covered());
    auto lane = swarm.backbone().open_lane();
    const moe::Program other{
        {toy::product(moe::SlabRole::kUp, 0), toy::product(moe::SlabRole::kDown, 1)}};
    std::vector<float> row(256), out(256);
    LayerBatch batch;
    batch.layer = kLayer0;
    batch.program = &other;
    batch.rows = reinterpret_cast<const uint8_t*>(row.data());
    batch.row_stride = 1024;
    batch.row_count = batch.used = 1;
    batch.pairs = {{0, 1, out.data()}};
    EXPECT_FALSE(lane->compute(batch).value());
    batch.layer = {9, 0};
    EXPECT_FALSE(lane->compute(batch).value());
    swarm.backbone().learn(kLayer0, other);  // the first program of a bank wins
    EXPECT_TRUE(swarm.check(*lane, kLayer0, {0, 1}, 2, 3).same_bits);
}

// Prompts larger than a request may be are split, and an expert with too many rows is computed
// here.
TEST(Batches, LongPromptsAreSplitAndKeepTheirBits) {
    ToySwarm swarm(true, 2000ms);
    auto one = swarm.worker(0, 8, "one");
    auto two = swarm.worker(0, 8, "two", Mood::kHonest,
                            [](wire::Hello& hello) { hello.pairs_max = hello.rows_max = 40; });
    ASSERT_TRUE(swarm.covered());
    auto lane = swarm.backbone().open_lane();
    std::mt19937 random(5);
    std::vector<uint32_t> ids;
    for (int t = 0; t < 300; ++t) {
        const uint32_t first = random() % 8;
        ids.push_back(first);
        ids.push_back((first + 1 + random() % 7) % 8);
    }
    for (uint64_t i = 0; i < 3; ++i) {
        const auto outcome = swarm.check(*lane, kLayer0, ids, 2, i);
        EXPECT_TRUE(outcome.computed && outcome.same_bits);
    }
    EXPECT_EQ(swarm.backbone().report().pairs_remote + swarm.backbone().report().pairs_local,
              1800u);
}

TEST(Lanes, SeveralShareWorkersThatComeAndGo) {
    ToySwarm swarm(true, 500ms);
    auto steady = swarm.worker(0, 5, "steady");
    auto other = swarm.worker(3, 8, "other");
    ASSERT_TRUE(swarm.covered());
    std::atomic<bool> wrong{false};
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
            std::mt19937_64 random(t);
            for (int life = 0; life < 3; ++life) {  // lanes end while others run
                auto lane = swarm.backbone().open_lane();
                for (int i = 0; i < 8; ++i) {
                    const auto first = static_cast<uint32_t>(random() % 8);
                    const auto outcome =
                        swarm.check(*lane, random() % 2 ? kLayer0 : kLayer1,
                                    {first, (first + 3) % 8, (first + 1) % 8, first}, 2, random());
                    if (outcome.computed && !outcome.same_bits) wrong = true;
                }
            }
        });
    }
    for (int i = 0; i < 3; ++i) {
        other.reset();
        other = swarm.worker(3, 8, "again");
    }
    for (auto& thread : threads) thread.join();
    EXPECT_FALSE(wrong);
    EXPECT_GT(swarm.backbone().report().pairs_remote, 0u);
}

}  // namespace
}  // namespace kvasir::backbone::testing
