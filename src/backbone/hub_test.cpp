// Joining: who may, who may not, and what they are told; the numeric challenge.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <vector>

#include "backbone/hub.hpp"
#include "backbone/swarm_testing.hpp"

namespace kvasir::backbone::testing {
namespace {

size_t connected(Backbone& backbone) {
    size_t count = 0;
    for (const WorkerReport& worker : backbone.report().workers) count += worker.connected ? 1 : 0;
    return count;
}

struct BadHello {
    const char* name;
    std::function<void(wire::Hello&)> edit;
    Errc code;
    std::vector<std::string> words;  // of the refusal
};

std::vector<BadHello> bad_hellos() {
    constexpr uint32_t kMax = 0xffffffff;
    const auto segment = [](LayerKey layer, uint32_t begin, uint32_t end) {
        return [=](wire::Hello& hello) { hello.segments[0].segment = {layer, begin, end}; };
    };
    const auto last = [](LayerKey layer) {
        return [=](wire::Hello& hello) { hello.segments[1].segment = {layer, 0, 8}; };
    };
    return {
        {"major 2", [](wire::Hello& hello) { hello.major = 2; }, Errc::kVersion, {"2.0", "1.0"}},
        {"major 0", [](wire::Hello& hello) { hello.major = 0; }, Errc::kVersion, {"0.0", "1.0"}},
        {"other model",
         [](wire::Hello& hello) { hello.model_id.fill(0xab); },
         Errc::kMismatch,
         {"abababab"}},
        {"digest",
         [](wire::Hello& hello) { hello.segments[1].digest[31] ^= 1; },
         Errc::kMismatch,
         {"digest", "1:0-8"}},
        {"nothing held",
         [](wire::Hello& hello) { hello.segments.clear(); },
         Errc::kMismatch,
         {"no experts"}},
        {"end + 1", segment(kLayer0, 0, 9), Errc::kMismatch, {"0:0-9"}},
        {"2^32 - 1 wide", segment(kLayer0, 0, kMax), Errc::kMismatch, {"4294967295"}},
        {"empty", segment(kLayer0, 3, 3), Errc::kProtocol, {"segments"}},
        {"upside down", segment(kLayer0, 5, 3), Errc::kProtocol, {"segments"}},
        {"layer 2", last({2, 0}), Errc::kMismatch, {"2:0-8"}},
        {"layer 2^32 - 1", last({kMax, 0}), Errc::kMismatch, {"4294967295:0-8"}},
        {"bank 1", segment({0, 1}, 0, 8), Errc::kMismatch, {"0c:0-8"}},
        {"twice",
         [](wire::Hello& hello) { hello.segments.push_back(hello.segments[1]); },
         Errc::kProtocol,
         {"segments"}},
        {"out of order",
         [](wire::Hello& hello) { std::swap(hello.segments[0], hello.segments[1]); },
         Errc::kProtocol,
         {"segments"}},
    };
}

TEST(Join, WhatDoesNotFitIsRefusedWithBothValues) {
    ToySwarm swarm;
    for (const BadHello& bad : bad_hellos()) {
        auto worker = swarm.worker(0, 8, "bad", Mood::kHonest, bad.edit);
        ASSERT_TRUE(eventually([&] { return worker->ended(); })) << bad.name;
        EXPECT_EQ(worker->last_code(), bad.code) << bad.name;
        for (const std::string& word : bad.words) {
            EXPECT_NE(worker->last_error().find(word), std::string::npos)
                << bad.name << ": " << worker->last_error();
        }
    }
    EXPECT_EQ(connected(swarm.backbone()), 0u);
    auto good = swarm.worker(0, 8, "good");
    EXPECT_TRUE(swarm.covered());
}

TEST(Join, ALaterMinorVersionIsFine) {
    ToySwarm swarm;
    auto worker =
        swarm.worker(0, 8, "newer", Mood::kHonest, [](wire::Hello& hello) { hello.minor = 7; });
    EXPECT_TRUE(swarm.covered());
}

// B9: another quantisation of the same model, and a node that comes back with another model in
// mid-session.
TEST(Join, AnotherQuantisationIsRefusedAndTheOldConnectionStays) {
    ToySwarm swarm;
    auto good =
        swarm.worker(0, 8, "good", Mood::kHonest, [](wire::Hello& hello) { hello.node.fill(9); });
    ASSERT_TRUE(swarm.covered());
    const toy::Folder folder;
    FakeOptions options;
    options.model = toy::write_toy(folder, "other.gguf", toy::toy_spec(1, 8));
    options.cache_dir = swarm.cache();
    options.segments = {{kLayer0, 0, 8}};
    options.port = swarm.backbone().port();
    options.node.fill(9);
    FakeWorker other(options);
    ASSERT_TRUE(eventually([&] { return other.ended(); }));
    EXPECT_EQ(other.last_code(), Errc::kMismatch);
    const auto own = moe::load_or_compute_manifest(toy::Toy(swarm.path()).model, swarm.cache());
    const auto theirs = moe::load_or_compute_manifest(toy::Toy(options.model).model, swarm.cache());
    ASSERT_TRUE(own && theirs);
    EXPECT_NE(other.last_error().find(to_hex(own->model_id).substr(0, 16)), std::string::npos)
        << other.last_error();
    EXPECT_NE(other.last_error().find(to_hex(theirs->model_id).substr(0, 16)), std::string::npos);
    EXPECT_EQ(connected(swarm.backbone()), 1u);
    auto lane = swarm.backbone().open_lane();
    EXPECT_TRUE(swarm.check(*lane, kLayer0, {0, 1}, 2, 1).same_bits);
}

TEST(Join, ANewerConnectionOfTheSameNodeReplacesTheOlder) {
    ToySwarm swarm;
    const auto same = [](wire::Hello& hello) { hello.node.fill(7); };
    auto older = swarm.worker(0, 8, "older", Mood::kHonest, same);
    ASSERT_TRUE(swarm.covered());
    auto newer = swarm.worker(0, 4, "newer", Mood::kHonest, same);
    EXPECT_TRUE(eventually([&] { return older->ended(); }));
    EXPECT_TRUE(eventually([&] { return swarm.backbone().coverage() == 0.5; }));
    EXPECT_EQ(connected(swarm.backbone()), 1u);
}

// ---- peers that are no workers ------------------------------------------------------------------

net::MessageStream dial(uint16_t port) {
    auto stream = net::dial(*net::parse_url("ws://127.0.0.1:" + std::to_string(port)));
    KVASIR_CHECK(stream.has_value());
    return std::move(*stream);
}

TEST(Join, GarbageIsToldAndClosed) {
    ToySwarm swarm;
    const std::vector<std::vector<uint8_t>> firsts = {
        {}, {0}, {'G'}, {0xff}, {'B'}, {'W', 'W'}, std::vector<uint8_t>(1000, 7)};
    for (const auto& first : firsts) {
        auto stream = dial(swarm.backbone().port());
        ASSERT_TRUE(stream.enqueue(first));
        auto message = stream.receive(net::Clock::now() + 5s);
        ASSERT_TRUE(message) << message.error().detail;
        auto frame = wire::decode_frame(*message);
        ASSERT_TRUE(frame);
        EXPECT_EQ(frame->header.type, wire::FrameType::kError);
        EXPECT_FALSE(stream.receive(net::Clock::now() + 5s));
    }
    std::vector<std::vector<uint8_t>> hellos = {{},
                                                {'W'},
                                                std::vector<uint8_t>(16, 0),
                                                std::vector<uint8_t>(200, 0xff),
                                                wire::encode_ping(1),
                                                wire::encode_simple(wire::FrameType::kGoodbye)};
    wire::Hello hello;
    hello.segments.resize(1);
    auto good = wire::encode_hello(hello);
    good.pop_back();
    hellos.push_back(good);
    for (const auto& bytes : hellos) {
        auto stream = dial(swarm.backbone().port());
        const uint8_t role[] = {'W'};
        ASSERT_TRUE(stream.enqueue(role));
        ASSERT_TRUE(stream.enqueue(bytes));
        auto message = stream.receive(net::Clock::now() + 5s);
        ASSERT_TRUE(message) << message.error().detail;
        EXPECT_EQ(wire::decode_frame(*message)->header.type, wire::FrameType::kError);
    }
    auto worker = swarm.worker(0, 8);
    EXPECT_TRUE(swarm.covered());
}

// A stranger must not make the backbone keep megabytes for it.
TEST(Join, AMessageLongerThanAnyHelloIsRefusedBeforeItHasArrived) {
    ToySwarm swarm;
    for (const bool with_role : {false, true}) {
        auto stream = dial(swarm.backbone().port());
        const uint8_t role[] = {'W'};
        if (with_role) {
            ASSERT_TRUE(stream.enqueue(role));
        }
        const std::vector<uint8_t> large(HubLimits{}.join_bytes_max + 1);
        ASSERT_TRUE(stream.enqueue(large));
        auto message = stream.receive(net::Clock::now() + 5s);
        ASSERT_FALSE(message);
        EXPECT_NE(message.error().detail.find("1009"), std::string::npos) << message.error().detail;
    }
    // A HELLO with as many segments as there may be is not too long.
    wire::Hello hello;
    hello.segments.resize(wire::kSegmentsMax);
    hello.name = hello.build.software = hello.build.engine = hello.build.isa =
        std::string(1024, 'x');
    hello.build.compiler = hello.build.kernels = hello.name;
    EXPECT_LE(wire::encode_hello(hello).size(), HubLimits{}.join_bytes_max);
    auto worker = swarm.worker(0, 8);
    EXPECT_TRUE(swarm.covered());  // the answers of its challenge are under other limits
}

// Connections that say nothing make room for a worker that does.
TEST(Join, ThreeHundredSilentConnectionsDoNotKeepAWorkerOut) {
    ToySwarm swarm;
    std::vector<net::MessageStream> silent;
    for (int i = 0; i < 300; ++i) silent.push_back(dial(swarm.backbone().port()));
    auto worker = swarm.worker(0, 8);
    EXPECT_TRUE(swarm.covered());
    auto lane = swarm.backbone().open_lane();
    EXPECT_TRUE(swarm.check(*lane, kLayer0, {0, 1}, 2, 1).same_bits);
}

// Frames right behind the HELLO, in one segment, are answered without waiting for more bytes.
TEST(Join, WhatComesWithTheHelloIsRead) {
    ToySwarm swarm;
    auto manifest = moe::load_or_compute_manifest(toy::Toy(swarm.path()).model, swarm.cache());
    wire::Hello hello;
    hello.model_id = manifest->model_id;
    hello.segments = {{{kLayer0, 0, 2}, manifest->segment_digest({kLayer0, 0, 2})}};
    auto stream = dial(swarm.backbone().port());
    const uint8_t role[] = {'W'};
    ASSERT_TRUE(stream.enqueue(role));
    ASSERT_TRUE(stream.enqueue(wire::encode_hello(hello)));
    ASSERT_TRUE(stream.enqueue(wire::encode_ping(42)));
    bool pong = false;
    for (int i = 0; i < 10 && !pong; ++i) {
        auto message = stream.receive(net::Clock::now() + 5s);
        ASSERT_TRUE(message) << message.error().detail;
        pong = wire::decode_frame(*message)->header.type == wire::FrameType::kPong;
    }
    EXPECT_TRUE(pong);
}

// ---- the challenge ------------------------------------------------------------------------------

TEST(Challenge, RightForOneRowAndWrongForSeveralIsNotEnough) {
    for (const bool strict : {true, false}) {
        ToySwarm swarm(strict);
        auto liar = swarm.worker(0, 8, "liar", Mood::kWrongForSeveral);
        EXPECT_TRUE(eventually([&] { return liar->ended(); }));
        EXPECT_EQ(liar->last_code(), Errc::kBadAnswer) << liar->last_error();
        EXPECT_EQ(swarm.backbone().coverage(), 0.0);
    }
}

TEST(Challenge, OtherBitsAreNotUsedWhereExactnessIsStrict) {
    ToySwarm swarm;
    auto other = swarm.worker(0, 8, "other", Mood::kRounded);
    EXPECT_TRUE(eventually([&] { return other->ended(); }));
    EXPECT_EQ(other->last_code(), Errc::kMismatch) << other->last_error();
    EXPECT_EQ(swarm.backbone().coverage(), 0.0);
    auto lane = swarm.backbone().open_lane();
    EXPECT_EQ(swarm.check(*lane, kLayer0, {0, 1}, 2, 1).remote_pairs, 0u);
    EXPECT_TRUE(swarm.backbone().report().exact);
}

TEST(Challenge, OtherBitsAreLabelledWhereTheyMayBeUsed) {
    ToySwarm swarm(false);
    auto other = swarm.worker(0, 8, "other", Mood::kRounded);
    ASSERT_TRUE(swarm.covered());
    // Right from now on: what was seen once is not forgotten.
    auto lane = swarm.backbone().open_lane();
    const auto outcome = swarm.check(*lane, kLayer0, {0, 1}, 2, 1);
    EXPECT_TRUE(outcome.computed);
    EXPECT_FALSE(outcome.same_bits);
    EXPECT_FALSE(swarm.backbone().report().exact);
    EXPECT_FALSE(swarm.backbone().report().workers.at(0).exact);
}

TEST(Challenge, AnErrorAtTheChallengeHoldsNothing) {
    ToySwarm swarm;
    auto failing = swarm.worker(0, 8, "failing", Mood::kError);
    EXPECT_TRUE(eventually([&] { return failing->computes() > 0; }));
    auto lane = swarm.backbone().open_lane();
    EXPECT_EQ(swarm.check(*lane, kLayer0, {0, 1}, 2, 1).remote_pairs, 0u);
    EXPECT_EQ(swarm.backbone().coverage(), 0.0);
}

// Whatever the reason, a refused PROGRAM costs that bank and nothing else.
TEST(Challenge, ABankWhoseProgramIsRefusedIsLeftOut) {
    ToySwarm swarm;
    auto worker = swarm.worker(0, 8, "half", Mood::kRefusesLayer1);
    ASSERT_TRUE(swarm.covered(0.5));
    EXPECT_TRUE(eventually([&] { return worker->refused() > 0; }));
    auto lane = swarm.backbone().open_lane();
    EXPECT_TRUE(swarm.check(*lane, kLayer0, {0, 1}, 2, 1).same_bits);
    EXPECT_EQ(swarm.check(*lane, kLayer1, {0, 1}, 2, 2).remote_pairs, 0u);
    EXPECT_EQ(connected(swarm.backbone()), 1u);
    EXPECT_EQ(swarm.backbone().coverage(), 0.5);
}

// A challenge obeys rows_max and pairs_max as every other request; the fake worker insists on it.
TEST(Challenge, IsNoLargerThanTheWorkerTakes) {
    for (const uint32_t most : {1u, 2u, 5u}) {
        ToySwarm swarm;
        auto worker = swarm.worker(0, 8, "small", Mood::kHonest, [=](wire::Hello& hello) {
            hello.rows_max = hello.pairs_max = most;
        });
        EXPECT_TRUE(swarm.covered()) << most << ": " << worker->last_error();
        auto lane = swarm.backbone().open_lane();
        EXPECT_TRUE(swarm.check(*lane, kLayer0, {0, 1}, 2, 1).same_bits);
    }
}

// ---- the roster ---------------------------------------------------------------------------------

TEST(Start, TooFewDescriptorsAreAnErrorAndNoCrash) {
#ifdef __SANITIZE_ADDRESS__
    // UBSan asks a pipe whether memory may be read, and takes the lack of one for a broken object.
    GTEST_SKIP() << "the sanitizer itself needs descriptors";
#endif
    (void)ToySwarm();  // what is opened once a process is open
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    const int first_free = dup(STDIN_FILENO);
    ASSERT_GE(first_free, 0);
    close(first_free);
    Options options;
    options.model_path = toy_file().path;
    options.cache_dir = toy_file().cache;
    options.listen = "127.0.0.1:0";
    int failed = 0;
    bool started = false;
    for (rlim_t more = 0; more < 40 && !started; ++more) {
        const rlimit few{static_cast<rlim_t>(first_free) + more, before.rlim_max};
        ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
        auto backbone = Backbone::start(options);
        if (!backbone) {
            EXPECT_EQ(backbone.error().code, Errc::kEnvironment) << backbone.error().detail;
            ++failed;
        } else {
            started = true;
            (void)(*backbone)->open_lane();  // null, or a lane
        }
    }
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_TRUE(started);
    EXPECT_GT(failed, 3);
}

TEST(Start, WrongModelsAndAddressesAreNamed) {
    Options options;
    options.model_path = "/nonexistent/model.gguf";
    auto missing = Backbone::start(options);
    ASSERT_FALSE(missing);
    EXPECT_NE(missing.error().detail.find("/nonexistent/model.gguf"), std::string::npos);
    options.model_path = toy_file().path;
    options.cache_dir = toy_file().cache;
    options.listen = "nonsense";
    EXPECT_EQ(Backbone::start(options).error().code, Errc::kUsage);
    options.listen = "";
    auto alone = Backbone::start(options);
    ASSERT_TRUE(alone);
    EXPECT_EQ((*alone)->port(), 0);
    EXPECT_EQ((*alone)->coverage(), 1.0);
}

}  // namespace
}  // namespace kvasir::backbone::testing
