// What ends by the clock, and what goes on across it: tokens are renewed on the live connection,
// the leases of a worker that was killed are taken over, `up` leaves in order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

// 16 experts of 1.25 MB in two layers. A token uses all of them, so that each costs at least one
// round trip to every worker that holds some of both layers: however fast the machine is, a far
// worker sets the pace.
std::string far_model(const ScratchFolder& scratch) {
    return synth(scratch.path("model.gguf"), {"--layers", "2", "--embd", "512", "--ff", "768",
                                              "--experts", "8", "--used", "8", "--type", "q8_0"});
}
constexpr uint64_t kExpertBytes = 3 * 512 * 768 / 32 * 34;

std::vector<std::string> prompt_of(unsigned tokens) {
    return {"--prompt-tokens", "1,2,3,4", "-n", std::to_string(tokens), "--ignore-eos"};
}

TEST(Lifetimes, ABackboneKeepsItsConnectionWhileItsTokensEnd) {
    const ScratchFolder scratch;
    const std::string model = far_model(scratch);
    const std::vector<std::string> prompt = prompt_of(150);
    MarketProgram market(model, scratch.path("state"), "127.0.0.1:0",
                         {"--token-life", "12", "--log-level", "info"});
    Program backbone = join_backbone(model, market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), prompt);
    // Two round trips a token: the text lasts at least 30 s, three quarters of a token's life 9 s.
    const FarLine line(market.url(), "100");
    Program worker = join_worker(line.url, market.worker_invite(), "far", scratch.path("far"),
                                 {.budget = "64M", .more = {}});
    ASSERT_TRUE(backbone.wait_for("debug text: ")) << backbone.err() << worker.err();
    const size_t before = count_of(backbone.err(), "token renewed");
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null());
    EXPECT_EQ(json["logits_sha256"], reference_digest(model, prompt));
    EXPECT_EQ(json["answers"], "exact");
    EXPECT_GT(json["pairs_remote"], 0);

    const size_t renewed = count_of(backbone.err(), "token renewed") - before;
    std::printf("tokens renewed on the live connection while the text was made: %zu\n", renewed);
    EXPECT_GE(renewed, 2u) << backbone.err();
    EXPECT_THAT(backbone.err(), Not(HasSubstr("next try in")));
    const std::string relay = market.program().err();
    EXPECT_EQ(count_of(relay, "role=backbone"), 1u) << relay;
    EXPECT_THAT(relay, Not(HasSubstr("code=expired")));
    EXPECT_EQ(count_of(worker.err(), "joined 127.0.0.1 with"), 1u) << worker.err();
    const std::string metrics = Operator(market.url(), scratch.path("state")).text("/metrics");
    EXPECT_THAT(metrics, HasSubstr("kvasir_relay_replaced_total 0\n"));
    EXPECT_THAT(metrics, HasSubstr("kvasir_relay_cut_total{reason=\"expired\"} 0\n"));
}

// L4: a download goes on across its token's end, and fetches nothing twice.
TEST(Lifetimes, ATokenEndsInMidDownload) {
    const ScratchFolder scratch;
    const std::string model = far_model(scratch);
    constexpr int kTokenLife = 5;
    MarketProgram market(model, scratch.path("state"), "127.0.0.1:0",
                         {"--token-life", std::to_string(kTokenLife)});
    // Eleven megabytes, one a second. What is cut off when the first token has ended is asked for
    // again, and needs another one.
    Program line(
        {KVASIR_WAN, "--to", "127.0.0.1:" + market.port(), "--rtt-ms", "20", "--mbit", "8"});
    ASSERT_TRUE(line.wait_for("listening "));
    Program worker =
        join_worker("https://127.0.0.1:" + line.word_after("listening "), market.worker_invite(),
                    "slow", scratch.path("slow"), {.budget = "12M", .more = {}});
    const auto has_part = [&] {
        std::error_code none_yet;
        for (const auto& entry :
             std::filesystem::directory_iterator(scratch.path("slow"), none_yet))
            if (entry.path().extension() == ".part") return true;
        return false;
    };
    ASSERT_TRUE(eventually(has_part)) << worker.err();
    const auto begin = Clock::now();
    const auto ended = begin + std::chrono::seconds(kTokenLife + 1);
    eventually([&] { return Clock::now() >= ended; });
    EXPECT_THAT(worker.err(), Not(HasSubstr("slice ready: "))) << "too early: nothing is shown";
    line.signal(SIGUSR1);
    ASSERT_TRUE(worker.wait_for("slice ready: ")) << worker.err();
    const std::chrono::duration<double> lasted = Clock::now() - begin;
    const auto fetched = std::stoull("0" + worker.word_after("slice ready: "));
    const auto received = std::stoull("0" + worker.word_after("ranges ("));
    const auto found = std::stoull("0" + worker.word_after("received), "));
    std::printf("%.1f s; at last %llu bytes fetched, %llu received, %llu were there\n",
                lasted.count(), fetched, received, found);
    EXPECT_EQ(fetched + found, 9 * kExpertBytes) << worker.err();
    EXPECT_LE(received, fetched + fetched / 100) << worker.err();
    EXPECT_TRUE(worker.wait_for("worker: serving ")) << worker.err();
    const Outcome verified = kvasir({"verify", slice_in(scratch.path("slow")), "--model", model,
                                     "--cache-dir", scratch.path("manifests")});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
}

// ---- leases ----

// So many are its, proven.
bool serves(Operator& desk, const std::string& name, uint64_t experts) {
    return eventually(
        [&] {
            const Json node = desk.node(name);
            return !node.is_null() && node["leases_loading"] == 0 &&
                   node["bytes_leased"] == experts * kExpertBytes;
        },
        120);
}

uint64_t experts_of(Operator& desk, const char* which) {
    const Json map = desk.get("/api/v1/coverage");
    return map.is_null() ? 0 : map[which].get<uint64_t>();
}

constexpr int kLeaseLife = 6;  // seconds; a worker gives a sign of life every third of that
constexpr int kSlack = kMeasures ? 4 : 20;  // for a machine that has more to do

TEST(Lifetimes, AKilledWorkersExpertsAreTakenOver) {
    const ScratchFolder scratch;
    const std::string model = far_model(scratch);
    const std::vector<std::string> prompt = prompt_of(500);
    MarketProgram market(model, scratch.path("state"), "127.0.0.1:0",
                         {"--lease-life", std::to_string(kLeaseLife)});
    Operator desk(market.url(), scratch.path("state"));
    const auto join = [&](const std::string& url, const char* name, const char* budget) {
        return join_worker(url, market.worker_invite(), name, scratch.path(name),
                           {.budget = budget, .more = {}});
    };
    // One after the other, each with just enough for its share: who has more takes copies of what
    // others hold, and nothing would be missing afterwards. The first one sets the pace of the
    // text, which must outlive all this: 500 round trips.
    const FarLine line(market.url(), "120");
    const Program pace = join(line.url, "pace", "2M");
    ASSERT_TRUE(serves(desk, "pace", 1)) << pace.err();
    Program killed = join(market.url(), "killed", "9500K");
    ASSERT_TRUE(serves(desk, "killed", 7)) << killed.err();
    Program other = join(market.url(), "other", "10800K");
    ASSERT_TRUE(serves(desk, "other", 8)) << other.err();
    ASSERT_TRUE(desk.all_served());
    Program backbone = join_backbone(model, market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), prompt);
    ASSERT_TRUE(backbone.wait_for("debug text: ", 5)) << backbone.err();

    // Its leases end a lease's life after its last sign; nobody has room for them.
    killed.signal(SIGKILL);
    killed.wait();
    const auto begin = Clock::now();
    EXPECT_TRUE(eventually([&] { return experts_of(desk, "experts_promised") == 9; }, 30));
    const std::chrono::duration<double> ended = Clock::now() - begin;
    EXPECT_LE(ended.count(), kLeaseLife + kSlack) << "longer than --lease-life";
    EXPECT_EQ(experts_of(desk, "experts_serving"), 9u);
    EXPECT_EQ(desk.node("killed")["bytes_leased"], 0);

    // With room for seven it takes those seven.
    Program heir = join(market.url(), "heir", "9500K");
    EXPECT_TRUE(serves(desk, "heir", 7)) << heir.err();
    EXPECT_TRUE(desk.all_served()) << desk.get("/api/v1/coverage").dump();
    const std::chrono::duration<double> whole = Clock::now() - begin;
    EXPECT_TRUE(heir.wait_for("joined 127.0.0.1 with")) << heir.err();
    ASSERT_TRUE(backbone.running()) << "the text must outlive this, or nothing is shown";
    // Nothing waits for a beat here: it asks, is given what is free, fetches 9 MB and proves them.
    EXPECT_LE((whole - ended).count(), kLeaseLife / 3 + kSlack) << "not at once";
    std::printf("leases ended %.1f s after the kill, all was held again %.1f s after it\n",
                ended.count(), whole.count());

    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null());
    EXPECT_EQ(json["logits_sha256"], reference_digest(model, prompt));
    EXPECT_EQ(json["tokens"].size(), 500u);
    EXPECT_EQ(json["answers"], "exact");
    for (const char* name : {"pace", "killed", "other", "heir"})
        EXPECT_GT(pairs_of(json, name), 0u) << name;
    EXPECT_TRUE(serves(desk, "other", 8)) << "it kept what it had";
}

// ---- flags ----

TEST(Lifetimes, FlagsOutOfBoundsAreNamed) {
    for (const char* command : {"market", "up"}) {
        for (const auto& [flag, value] :
             std::vector<std::pair<std::string, std::string>>{{"--token-life", "4"},
                                                              {"--token-life", "2592001"},
                                                              {"--token-life", "soon"},
                                                              {"--lease-life", "2"},
                                                              {"--lease-life", "86401"},
                                                              {"--per-address", "0"}}) {
            const Outcome outcome = kvasir({command, "-m", demo_model(), "--plain", flag, value});
            EXPECT_EQ(outcome.exit_code, 2) << command << " " << flag << " " << value;
            EXPECT_THAT(outcome.err, HasSubstr(flag));
        }
    }
}

TEST(Lifetimes, OneAddressGetsAsManyConnectionsAsTheMarketSays) {
    const ScratchFolder scratch;
    MarketProgram market(demo_model(), scratch.path("state"), "127.0.0.1:0",
                         {"--per-address", "2"});
    const auto join = [&](const char* name) {
        return join_worker(market.url(), market.worker_invite(), name, scratch.path(name),
                           {.budget = "2M", .more = {}});
    };
    Program first = join("first");
    Program second = join("second");
    ASSERT_TRUE(first.wait_for("attached to 127.0.0.1")) << first.err();
    ASSERT_TRUE(second.wait_for("attached to 127.0.0.1")) << second.err();
    Program third = join("third");
    EXPECT_TRUE(third.wait_for("2 connections from your address")) << third.err();
    EXPECT_TRUE(third.wait_for("trying again until the relay answers")) << third.err();
    EXPECT_THAT(third.err(), Not(HasSubstr("attached to 127.0.0.1")));
}

// ---- up ----

Program start_up(const std::string& state, const std::string& where,
                 const std::vector<std::string>& prompt) {
    std::vector<std::string> argv = {KVASIR_PROGRAM, "up",     "-m",          demo_model(),
                                     "--listen",     where,    "--dev-tls",   "--state",
                                     state,          "--json", "--log-level", "debug"};
    argv.insert(argv.end(), prompt.begin(), prompt.end());
    Program up(argv);
    EXPECT_TRUE(up.wait_for("join: kvasir worker --join ")) << up.err();
    return up;
}

// Without the answer that it was asked for.
void expect_left_in_order(const Program& up, int signal, const std::string& says) {
    const Outcome ended = up.wait(30);
    EXPECT_EQ(ended.exit_code, 128 + signal) << ended.err;
    EXPECT_EQ(ended.out, "");
    EXPECT_THAT(ended.err, HasSubstr("telling nodes to come again"));
    EXPECT_THAT(ended.err, HasSubstr(says));
}

TEST(Lifetimes, UpLeavesInOrderWhileItWaitsForWorkers) {
    const ScratchFolder scratch;
    Program up = start_up(scratch.path("state"), "127.0.0.1:0", {"-p", "Once", "-n", "8"});
    ASSERT_TRUE(up.wait_for("attached to relay")) << up.err();
    ASSERT_TRUE(up.wait_for("waiting for 100 %")) << up.err();
    up.signal(SIGINT);
    expect_left_in_order(up, SIGINT, "event=drain nodes=1 within_ms=2000");
}

TEST(Lifetimes, TwoBackbonesWithOneKeyAreRefused) {
    const ScratchFolder scratch;
    const Program up = start_up(scratch.path("state"), "127.0.0.1:0", {"-p", "Once", "-n", "8"});
    const Outcome second = kvasir({"up", "-m", demo_model(), "--listen", "127.0.0.1:0", "--plain",
                                   "--state", scratch.path("state")});
    EXPECT_EQ(second.exit_code, 2);
    EXPECT_THAT(second.err, HasSubstr("another backbone uses this state folder"));
    const Outcome joined =
        kvasir({"run", "-m", demo_model(), "--join", up.word_after("--join "), "--invite",
                up.word_after("--invite "), "--state", scratch.path("state"), "-p", "Once"});
    EXPECT_EQ(joined.exit_code, 2);
    EXPECT_THAT(joined.err, HasSubstr("another backbone uses this state folder"));
}

TEST(Lifetimes, ABackboneOfAnotherQuantisationIsNotLetIn) {
    const ScratchFolder scratch;
    const auto model = [&](const char* type) {
        return synth(scratch.path(type), {"--type", type, "--layers", "2"});
    };
    const std::string q4 = model("q4_0");
    const std::string q8 = model("q8_0");
    const auto id = [](const std::string& path) {
        const Json slice = run_json({"slice", path, "--experts", "0:0", "-o", path + ".slice"});
        return slice["model_id"].get<std::string>().substr(0, 16);
    };
    MarketProgram market(q4, scratch.path("state"), "127.0.0.1:0", {"--uses", "1"});
    const auto run = [&](const std::string& path) {
        return join_backbone(path, market.url(), market.backbone_invite(), scratch.path("backbone"),
                             {"--prompt-tokens", "1", "-n", "1", "--wait-coverage", "0%"});
    };
    const Outcome other = run(q8).wait();
    EXPECT_EQ(other.exit_code, 1) << other.err;
    EXPECT_THAT(other.err, HasSubstr(q8));
    EXPECT_THAT(other.err, HasSubstr("(id " + id(q8)));
    EXPECT_THAT(other.err, HasSubstr("the market's is"));
    EXPECT_THAT(other.err, HasSubstr("(id " + id(q4)));
    EXPECT_THAT(other.err, HasSubstr("another quantisation"));
    // The invite is good for one, and still is.
    EXPECT_EQ(report_of(run(q4))["tokens"].size(), 1u);
}

TEST(Lifetimes, UrlsThatNobodyCanDialAreNamed) {
    const std::vector<std::string> start = {"market",      "-m",      demo_model(), "--listen",
                                            "127.0.0.1:0", "--plain", "--state",    "/nowhere"};
    for (const auto& [flag, value] :
         std::vector<std::pair<std::string, std::string>>{{"--public-url", "backbone.example"},
                                                          {"--relay-url", "http://relay.example"},
                                                          {"--relay-url", "wss://"},
                                                          {"--relay-url", "wss://:1"},
                                                          {"--relay-url", "wss://a b:99999999"},
                                                          {"--relay-url", "wss://relay.example:0"},
                                                          {"--origin", "files.example"},
                                                          {"--origin", "https://"}}) {
        std::vector<std::string> argv = start;
        argv.insert(argv.end(), {flag, value});
        const Outcome outcome = kvasir(argv);
        EXPECT_EQ(outcome.exit_code, 2) << flag << " " << value;
        EXPECT_THAT(outcome.err, HasSubstr(flag + ": "));
    }
    const Outcome less =
        kvasir({"worker", "--join", "https://127.0.0.1:1", "--invite", "x", "--budget", "-5"});
    EXPECT_EQ(less.exit_code, 2);
    EXPECT_THAT(less.err, HasSubstr("is not a size"));
}

// What nodes are sent to must have TLS as the market has, and no secrets: all of them see it.
TEST(Lifetimes, AnOriginWithoutTlsOrWithSecretsIsTold) {
    // With a state folder that cannot be, so that it ends where the flags were good.
    const auto market = [](const std::string& origin, const char* way) {
        return kvasir({"market", "-m", demo_model(), "--listen", "127.0.0.1:0", "--state",
                       "/proc/nowhere", "--origin", origin, way});
    };
    const auto is_refused = [&](const std::string& origin, const char* way) {
        const Outcome outcome = market(origin, way);
        EXPECT_NE(outcome.exit_code, 0);
        const bool is_told = outcome.err.find("has no TLS") != std::string::npos;
        EXPECT_EQ(outcome.exit_code, is_told ? 2 : 4) << outcome.err;
        return is_told;
    };
    EXPECT_TRUE(is_refused("http://files.example/models", "--dev-tls"));
    EXPECT_TRUE(is_refused("http://10.0.0.1/{file}", "--dev-tls"));
    EXPECT_FALSE(is_refused("http://files.example/models", "--plain"));
    EXPECT_TRUE(is_refused("http://127.0.0.1:81/models", "--dev-tls"));
    EXPECT_TRUE(is_refused("http://127.0.0.1:81/models", "--log-level=warn"));  // TLS all the same
    EXPECT_FALSE(is_refused("http://127.0.0.1:81/models", "--plain"));
    EXPECT_FALSE(is_refused("https://files.example/{file}", "--dev-tls"));

    const std::string warning = "reaches every node";
    EXPECT_THAT(market("https://b.example/{file}?sig=S3cret", "--dev-tls").err,
                AllOf(HasSubstr(warning), Not(HasSubstr("S3cret"))));
    EXPECT_THAT(market("https://b.example/{file}", "--dev-tls").err, Not(HasSubstr(warning)));
}

TEST(Lifetimes, UpLeavesInOrderInMidTextAndItsWorkersComeBack) {
    const ScratchFolder scratch;
    Program up = start_up(scratch.path("state"), "127.0.0.1:0", {"-p", "Once", "-n", "200"});
    const std::string url = up.word_after("--join ");
    // Eight round trips a token: in the few seconds that it has it cannot come to its end.
    const FarLine line(url, "60");
    Program worker = join_worker(line.url, up.word_after("--invite "), "w", scratch.path("w"),
                                 {.budget = "64M", .more = {}});
    ASSERT_TRUE(up.wait_for("debug text: ", 3)) << up.err() << worker.err();
    up.signal(SIGTERM);
    expect_left_in_order(up, SIGTERM, "event=drain nodes=2 within_ms=2000");
    EXPECT_TRUE(worker.running()) << worker.err();

    const std::vector<std::string> prompt = {"-p", "Once upon a time", "-n", "16"};
    up = start_up(scratch.path("state"), url.substr(url.rfind('/') + 1), prompt);
    const Json json = report_of(up);
    ASSERT_FALSE(json.is_null()) << worker.err();
    EXPECT_EQ(json["logits_sha256"], reference_digest(demo_model(), prompt));
    EXPECT_GT(pairs_of(json, "w"), 0u);
}

}  // namespace
}  // namespace kvasir::e2e
