// The whole network as people use it: market, relay, backbone and workers as programs of their own,
// on good and bad lines, with what breaks in between: the logits are llama.cpp's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kPrompt = {"-p", "Once upon a time", "-n", "64"};

// A text that lives through what happens to a swarm; under sanitizers every token takes longer.
constexpr size_t kLongTokens = kMeasures ? 900 : 300;
const std::vector<std::string> kLongPrompt = {"--prompt-tokens", "1,2,3,4", "-n",
                                              std::to_string(kLongTokens), "--ignore-eos"};

// For a backbone that is alone for a while: one thread, as fast on many cores as on few.
std::vector<std::string> slow_prompt(size_t tokens) {
    return {"--prompt-tokens", "1,2,3,4",   "-n", std::to_string(tokens),
            "--ignore-eos",    "--threads", "1"};
}

const std::string& demo_reference() {
    static const std::string digest = reference_digest(demo_model(), kPrompt);
    return digest;
}

size_t tokens_so_far(const Program& backbone) {
    return count_of(backbone.err(), "debug text: ");
}

// That many connections of the worker have been proven, one after the other.
bool is_proven(const Program& backbone, const std::string& name, size_t times) {
    return eventually(
        [&] {
            const std::string err = backbone.err();
            std::set<std::string> proven;
            const std::string before = " " + name + "#";
            for (size_t at = 0; (at = err.find(before, at)) != err.npos; ++at) {
                const std::string line = err.substr(at + 1, err.find('\n', at) - at - 1);
                const size_t end = line.find(" is exact on layer");
                if (end != line.npos) proven.insert(line.substr(0, end));
            }
            return proven.size() >= times || !backbone.running();
        },
        120);
}

// `kvasir up` with the prompt, which waits for workers.
struct UpProgram {
    Program program;
    std::string url, invite;

    UpProgram(const std::string& state, const std::vector<std::string>& prompt)
        : program(command(state, prompt)) {
        EXPECT_TRUE(program.wait_for("join: kvasir worker --join ")) << program.err();
        url = program.word_after("--join ");
        invite = program.word_after("--invite ");
    }
    static std::vector<std::string> command(const std::string& state,
                                            const std::vector<std::string>& prompt) {
        std::vector<std::string> argv = {KVASIR_PROGRAM, "up",          "-m",          demo_model(),
                                         "--listen",     "127.0.0.1:0", "--dev-tls",   "--state",
                                         state,          "--json",      "--log-level", "info"};
        argv.insert(argv.end(), prompt.begin(), prompt.end());
        return argv;
    }
};

TEST(Network, UpAnswersWithJoinedWorkers) {
    const ScratchFolder scratch;
    UpProgram up(scratch.path("state"), kPrompt);
    Program a = join_worker(up.url, up.invite, "a", scratch.path("a"));
    Program b = join_worker(up.url, up.invite, "b", scratch.path("b"));
    const Json json = report_of(up.program);
    ASSERT_FALSE(json.is_null()) << a.err() << b.err();
    EXPECT_EQ(json["logits_sha256"], demo_reference());
    EXPECT_EQ(json["answers"], "exact");
    EXPECT_GT(pairs_of(json, "a"), 0u);
    EXPECT_GT(pairs_of(json, "b"), 0u);
    if (json["retries"] == 0) {
        EXPECT_EQ(json["pairs_local"], 0) << "all experts were held";
    }
    for (const char* name : {"a", "b"}) {
        const Outcome verified = kvasir({"verify", slice_in(scratch.path(name)), "--model",
                                         demo_model(), "--cache-dir", scratch.path("manifests")});
        EXPECT_EQ(verified.exit_code, 0) << verified.err;
        EXPECT_THAT(verified.out, HasSubstr("byte for byte"));
    }
}

TEST(Network, AWorkerReleasesItsLeasesAndFetchesNothingTwice) {
    const ScratchFolder scratch;
    MarketProgram market(demo_model(), scratch.path("state"));
    Operator desk(market.url(), scratch.path("state"));
    uint64_t served_first = 0;
    for (const bool again : {false, true}) {
        SCOPED_TRACE(again ? "with the slice in its cache" : "from nothing");
        Program worker = join_worker(market.url(), market.worker_invite(), "w", scratch.path("w"));
        ASSERT_TRUE(desk.serves("w")) << worker.err();
        const Json serving = desk.node("w");
        const auto served = serving["bytes_served"].get<uint64_t>();
        EXPECT_GT(served, 0u);
        if (again) {
            EXPECT_EQ(served, served_first);
            EXPECT_THAT(worker.err(), HasSubstr("slice ready: 0 bytes fetched"));
        }
        served_first = served;
        worker.signal(SIGTERM);
        const Outcome ended = worker.wait(30);
        EXPECT_EQ(ended.exit_code, 0) << ended.err;
        const Json left = desk.node("w");
        ASSERT_FALSE(left.is_null());
        EXPECT_EQ(left["leases_serving"], 0);
        EXPECT_EQ(left["leases_loading"], 0);
        EXPECT_EQ(desk.get("/api/v1/coverage")["experts_promised"], 0);
    }
    EXPECT_EQ(desk.get("/api/v1/nodes")["nodes"].size(), 1u) << "one node, however often it starts";
}

TEST(Network, SeparateProcesses) {
    const ScratchFolder scratch;
    MarketProgram market(demo_model(), scratch.path("state"));
    Program backbone = join_backbone(demo_model(), market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), kPrompt);
    Program a = join_worker(market.url(), market.worker_invite(), "a", scratch.path("a"));
    Program b = join_worker(market.url(), market.worker_invite(), "b", scratch.path("b"));
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null()) << a.err() << b.err();
    EXPECT_EQ(json["logits_sha256"], demo_reference());
    EXPECT_EQ(json["answers"], "exact");
    EXPECT_GT(pairs_of(json, "a"), 0u);
    EXPECT_GT(pairs_of(json, "b"), 0u);
    EXPECT_TRUE(Operator(market.url(), scratch.path("state")).all_served());
}

TEST(Network, OverABadLine) {
    const ScratchFolder scratch;
    // The text must live through several cuts: a third worker, on a good line, sets its pace.
    const std::string model =
        synth(scratch.path("model.gguf"), {"--layers", "3", "--embd", "512", "--ff", "768",
                                           "--experts", "8", "--used", "8", "--type", "q8_0"});
    MarketProgram market(model, scratch.path("state"));
    Program line({KVASIR_WAN, "--to", "127.0.0.1:" + market.port(), "--rtt-ms", "60", "--jitter-ms",
                  "10", "--mbit", "20", "--stall-every-ms", "2500", "--stall-ms", "400",
                  "--cut-every-ms", "4000"});
    ASSERT_TRUE(line.wait_for("listening "));
    const std::string url = "https://127.0.0.1:" + line.word_after("listening ");
    Operator desk(market.url(), scratch.path("state"));
    const FarLine far(market.url(), "25");
    const Program pace = join_worker(far.url, market.worker_invite(), "pace", scratch.path("pace"),
                                     {.budget = "2M", .more = {}});
    ASSERT_TRUE(desk.serves("pace")) << pace.err();
    Program a = join_worker(url, market.worker_invite(), "a", scratch.path("a"),
                            {.budget = "16M", .more = {}});
    Program b = join_worker(url, market.worker_invite(), "b", scratch.path("b"),
                            {.budget = "16M", .more = {}});
    Program backbone = join_backbone(model, market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), kLongPrompt);
    const Json json = report_of(backbone, 400);
    ASSERT_FALSE(json.is_null()) << a.err() << b.err();
    expect_exact_text(json, model, kLongPrompt, kLongTokens);
    std::printf("bad line: %.1f tokens/s, pairs %llu remote, %llu here, %llu again; rows %zu\n",
                json["gen_tok_s"].get<double>(),
                static_cast<unsigned long long>(json["pairs_remote"].get<uint64_t>()),
                static_cast<unsigned long long>(json["pairs_local"].get<uint64_t>()),
                static_cast<unsigned long long>(json["retries"].get<uint64_t>()),
                json["workers"].size());
    for (const char* name : {"a", "b"}) {
        EXPECT_GE(connections_with_work(json, name), 2u) << json["workers"].dump(2);
    }
    // What was cut off goes on where it was: hardly a byte crosses the line twice.
    for (Program* worker : {&a, &b}) {
        EXPECT_TRUE(worker->running()) << "a bad line ends no worker: " << worker->err();
        const auto fetched = std::stoull("0" + worker->word_after("slice ready: "));
        const auto received = std::stoull("0" + worker->word_after("ranges ("));
        std::printf("fetched %llu bytes, received %llu\n", fetched, received);
        EXPECT_GT(fetched, 14'000'000u) << worker->err();
        EXPECT_LE(received, fetched + fetched / 100);
    }
}

// Backbone and workers, all behind one bad line, that cuts them off in mid-text.
TEST(Network, EverybodyIsBehindABadLine) {
    const ScratchFolder scratch;
    // Small experts, which come over that line, and a vocabulary that makes a token cost something
    // also while the backbone is alone.
    const std::string model =
        synth(scratch.path("model.gguf"),
              {"--layers", "2", "--embd", "1024", "--ff", "256", "--experts", "8", "--used", "8",
               "--type", "q8_0", "--type-dense", "q8_0", "--vocab", "65536"});
    // While it is alone nothing but its one thread sets the pace.
    constexpr size_t kTokens = kMeasures ? 1500 : 750;
    const std::vector<std::string> prompt = slow_prompt(kTokens);
    MarketProgram market(model, scratch.path("state"));
    Program line({KVASIR_WAN, "--to", "127.0.0.1:" + market.port(), "--rtt-ms", "60", "--jitter-ms",
                  "10", "--mbit", "20", "--stall-every-ms", "2500", "--stall-ms", "400"});
    ASSERT_TRUE(line.wait_for("listening "));
    const std::string url = "https://127.0.0.1:" + line.word_after("listening ");
    std::map<std::string, Program> workers;
    for (const char* name : {"a", "b"}) {
        workers.emplace(name, join_worker(url, market.worker_invite(), name, scratch.path(name),
                                          {.budget = "8M", .more = {}}));
    }
    Program backbone =
        join_backbone(model, url, market.backbone_invite(), scratch.path("backbone"), prompt);
    const auto more_tokens = [&] {
        return backbone.wait_for("debug text: ", tokens_so_far(backbone) + 5, 240);
    };
    ASSERT_TRUE(more_tokens()) << backbone.err();
    line.signal(SIGUSR1);
    for (const auto& [name, worker] : workers) {
        ASSERT_TRUE(is_proven(backbone, name, 2)) << worker.err();
    }
    EXPECT_TRUE(more_tokens());
    std::printf("cut and back after %zu of %zu tokens\n", tokens_so_far(backbone), kTokens);
    EXPECT_TRUE(backbone.running()) << "the text must outlive the cut, or nothing is shown";
    line.signal(SIGUSR2);  // the rest need not take so long
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null());
    expect_exact_text(json, model, prompt, kTokens);
    for (const auto& [name, worker] : workers) {
        EXPECT_GE(connections_with_work(json, name), 2u) << json["workers"].dump(2);
        EXPECT_TRUE(worker.running()) << worker.err();
    }
}

TEST(Network, Churn) {
    const ScratchFolder scratch;
    // A far worker sets the pace, so that the text outlives what happens to the others.
    const std::string model =
        synth(scratch.path("model.gguf"), {"--layers", "3", "--embd", "1024", "--ff", "1536",
                                           "--experts", "8", "--used", "8", "--type", "q8_0"});
    MarketProgram market(model, scratch.path("state"));
    const FarLine far(market.url(), "30");
    Program backbone = join_backbone(model, market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), kLongPrompt);
    // 24 experts of 5 MB: one for the pace, and nobody else has copies of what another computes.
    const Program pace = join_worker(far.url, market.worker_invite(), "pace", scratch.path("pace"),
                                     {.budget = "6M", .more = {}});
    std::map<std::string, Program> workers;
    for (const char* name : {"killed", "stopped", "steady"}) {
        workers.emplace(name, join_worker(market.url(), market.worker_invite(), name,
                                          scratch.path(name), {.budget = "42M", .more = {}}));
    }
    const auto tokens = [&](size_t count) { return backbone.wait_for("debug text: ", count, 240); };
    ASSERT_TRUE(tokens(30)) << backbone.err();
    workers.at("killed").signal(SIGKILL);
    ASSERT_TRUE(tokens(60));
    workers.at("stopped").signal(SIGSTOP);
    ASSERT_TRUE(tokens(90));
    const auto stop_over = std::chrono::steady_clock::now() + std::chrono::seconds(3);
    eventually([&] { return std::chrono::steady_clock::now() >= stop_over; });
    workers.at("stopped").signal(SIGCONT);
    market.kill_and_restart();
    Operator desk(market.url(), scratch.path("state"));
    for (const char* name : {"stopped", "steady"}) {
        EXPECT_TRUE(workers.at(name).wait_for("joined 127.0.0.1 with", 2, 60))
            << name << " did not come back: " << workers.at(name).err();
    }
    workers.at("killed") = join_worker(market.url(), market.worker_invite(), "killed",
                                       scratch.path("killed"), {.budget = "42M", .more = {}});
    EXPECT_TRUE(workers.at("killed").wait_for("joined 127.0.0.1 with", 1, 60))
        << workers.at("killed").err();
    EXPECT_TRUE(backbone.running()) << "the text must outlive the outage, or nothing is shown";
    std::printf("churn: all are back after %zu of %zu tokens\n", tokens_so_far(backbone),
                kLongTokens);
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null());
    expect_exact_text(json, model, kLongPrompt, kLongTokens);
    for (const char* name : {"killed", "stopped", "steady"}) {
        EXPECT_GE(connections_with_work(json, name), 2u) << json["workers"].dump(2);
    }
    EXPECT_TRUE(eventually([&] { return desk.all_served(); }));
}

// Relay and market as two processes: each is killed in mid-text while the other lives.
TEST(Network, ARelayAndItsMarketDieApart) {
    const ScratchFolder scratch;
    const std::string model =
        synth(scratch.path("model.gguf"), {"--layers", "3", "--embd", "1024", "--ff", "1536",
                                           "--experts", "8", "--used", "8", "--type", "q8_0"});
    // The way to the relay sets the pace as long as workers are there.
    RelayElsewhere swarm(model, scratch.path("state"), "info", {}, "10");
    MarketProgram& market = swarm.market();
    std::map<std::string, Program> workers;
    for (const char* name : {"a", "b"}) {
        workers.emplace(name, join_worker(market.url(), market.worker_invite(), name,
                                          scratch.path(name), {.budget = "72M", .more = {}}));
    }
    constexpr size_t kTokens = kMeasures ? 1200 : 600;
    const std::vector<std::string> prompt = slow_prompt(kTokens);
    Program backbone = join_backbone(model, market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), prompt);
    const auto more_tokens = [&](size_t more) {
        return backbone.wait_for("debug text: ", tokens_so_far(backbone) + more, 240);
    };
    ASSERT_TRUE(more_tokens(20)) << backbone.err();
    swarm.kill_and_restart_relay();
    for (const auto& [name, worker] : workers) {
        ASSERT_TRUE(is_proven(backbone, name, 2)) << worker.err();
    }
    std::printf("the relay is back after %zu of %zu tokens\n", tokens_so_far(backbone), kTokens);
    EXPECT_TRUE(more_tokens(5));
    EXPECT_TRUE(market.program().running());

    market.kill();
    EXPECT_TRUE(swarm.relay().wait_for("revoked tokens are not known")) << swarm.relay().err();
    EXPECT_TRUE(more_tokens(5)) << "without a market the text goes on";
    market.restart();
    EXPECT_TRUE(swarm.relay().wait_for("says again")) << swarm.relay().err();
    std::printf("the market is back after %zu of %zu tokens\n", tokens_so_far(backbone), kTokens);
    EXPECT_TRUE(backbone.running()) << "the text must outlive both, or nothing is shown";
    swarm.line().program.signal(SIGUSR2);  // the rest need not take so long

    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null());
    expect_exact_text(json, model, prompt, kTokens);
    for (const auto& [name, worker] : workers) {
        // One before the relay's end, one after it: the market's end cuts nobody off.
        EXPECT_EQ(connections_with_work(json, name), 2u) << json["workers"].dump(2);
        EXPECT_TRUE(worker.running()) << worker.err();
    }
    Operator desk(market.url(), scratch.path("state"));
    EXPECT_TRUE(eventually([&] { return desk.all_served(); }));
}

TEST(Network, PlannedBytesOnly) {
    const ScratchFolder scratch;
    const std::string model =
        synth(scratch.path("model.gguf"), {"--layers", "2", "--embd", "1024", "--ff", "512",
                                           "--experts", "16", "--used", "2", "--type", "q8_0"});
    MarketProgram market(model, scratch.path("state"));
    Operator desk(market.url(), scratch.path("state"));
    Program worker = join_worker(market.url(), market.worker_invite(), "part", scratch.path("part"),
                                 {.budget = "20M", .more = {}});
    ASSERT_TRUE(desk.serves("part")) << worker.err();
    const Json node = desk.node("part");
    const auto leased = node["bytes_leased"].get<uint64_t>();
    const auto served = node["bytes_served"].get<uint64_t>();
    std::printf("model %llu bytes, leased %llu, served %llu\n",
                static_cast<unsigned long long>(std::filesystem::file_size(model)),
                static_cast<unsigned long long>(leased), static_cast<unsigned long long>(served));
    EXPECT_GT(leased, 10'000'000u);
    EXPECT_LE(leased, 20'000'000u);
    EXPECT_GE(served, leased);
    EXPECT_LE(served, leased + leased / 100);
    EXPECT_GE(std::filesystem::file_size(slice_in(scratch.path("part"))), leased);
}

}  // namespace
}  // namespace kvasir::e2e
