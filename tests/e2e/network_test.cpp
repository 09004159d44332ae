// The whole network as people use it: market, relay, backbone and workers as programs of their own,
// on good and bad lines, with what breaks in between: the logits are llama.cpp's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <map>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<std::string> kPrompt = {"-p", "Once upon a time", "-n", "64"};

// A text that lives through what happens to a swarm; under sanitizers every token takes longer.
constexpr size_t kLongTokens = kMeasures ? 900 : 300;
const std::vector<std::string> kLongPrompt = {"--prompt-tokens", "1,2,3,4", "-n",
                                              std::to_string(kLongTokens), "--ignore-eos"};

const std::string& demo_reference() {
    static const std::string digest = reference_digest(demo_model(), kPrompt);
    return digest;
}

// Of all rows of that worker: one a connection.
size_t connections_with_work(const Json& report, const std::string& name) {
    size_t count = 0;
    for (const Json& worker : report["workers"]) {
        const bool is_his = worker["id"].get<std::string>().rfind(name + "#", 0) == 0;
        if (is_his && worker["pairs"].get<uint64_t>() > 0) ++count;
    }
    return count;
}

// Its leases are proven, also where no backbone is there to say hello to.
bool serves(Operator& desk, const std::string& name) {
    return eventually([&] {
        const Json node = desk.node(name);
        return !node.is_null() && node["leases_serving"] > 0 && node["leases_loading"] == 0;
    });
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
        ASSERT_TRUE(serves(desk, "w")) << worker.err();
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
    ASSERT_TRUE(serves(desk, "pace")) << pace.err();
    Program a = join_worker(url, market.worker_invite(), "a", scratch.path("a"),
                            {.budget = "16M", .more = {}});
    Program b = join_worker(url, market.worker_invite(), "b", scratch.path("b"),
                            {.budget = "16M", .more = {}});
    Program backbone = join_backbone(model, market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), kLongPrompt);
    const Json json = report_of(backbone, 400);
    ASSERT_FALSE(json.is_null()) << a.err() << b.err();
    EXPECT_EQ(json["logits_sha256"], reference_digest(model, kLongPrompt));
    EXPECT_EQ(json["tokens"].size(), kLongTokens);
    EXPECT_EQ(json["answers"], "exact");
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
    const std::string so_far = backbone.err();
    size_t done = 0;
    for (size_t at = 0; (at = so_far.find("debug text: ", at)) != std::string::npos; ++at) ++done;
    std::printf("churn: all are back after %zu of %zu tokens\n", done, kLongTokens);
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null());
    EXPECT_EQ(json["logits_sha256"], reference_digest(model, kLongPrompt));
    EXPECT_EQ(json["tokens"].size(), kLongTokens);
    EXPECT_EQ(json["answers"], "exact");
    for (const char* name : {"killed", "stopped", "steady"}) {
        EXPECT_GE(connections_with_work(json, name), 2u) << json["workers"].dump(2);
    }
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
    ASSERT_TRUE(serves(desk, "part")) << worker.err();
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

// ---- who is refused ----

// A worker that does not get in ends by itself, with a reason for people.
void expect_refused(const std::string& what, const Program& worker, int exit_code,
                    const std::string& says) {
    SCOPED_TRACE(what);
    const Outcome ended = worker.wait(60);
    EXPECT_EQ(ended.exit_code, exit_code) << ended.err;
    EXPECT_THAT(ended.err, HasSubstr(says));
    EXPECT_THAT(ended.err, HasSubstr("kvasir: "));
    std::printf("%s: exit %d: %s\n", what.c_str(), ended.exit_code,
                ended.err.substr(std::min(ended.err.rfind("kvasir: "), ended.err.size())).c_str());
}

class Refusals {
public:
    Refusals() : market_(demo_model(), scratch_.path("state"), "127.0.0.1:0", {"--uses", "1"}) {}
    Program join(const std::string& url, const std::string& invite) {
        const std::string name = "w" + std::to_string(++count_);
        return join_worker(url, invite, name, scratch_.path(name));
    }
    std::string path(const std::string& name) const { return scratch_.path(name); }
    MarketProgram& market() { return market_; }

private:
    const ScratchFolder scratch_;
    MarketProgram market_;
    int count_ = 0;
};

TEST(Network, InvitesThatAreRefused) {
    Refusals scene;
    const MarketProgram other(demo_model(), scene.path("other"));
    const std::string url = scene.market().url();
    const std::string invite = scene.market().worker_invite();
    std::string mistyped = invite;
    mistyped[20] = mistyped[20] == 'x' ? 'y' : 'x';
    expect_refused("mistyped", scene.join(url, mistyped), 2, "invite");
    expect_refused("cut off", scene.join(url, invite.substr(0, 40)), 2, "invite");
    // Another market has another certificate, too: that comes first.
    expect_refused("another market", scene.join(url, other.worker_invite()), 1, "pin");
    Program first = scene.join(url, invite);
    ASSERT_TRUE(first.wait_for("worker: serving ")) << first.err();
    expect_refused("used up", scene.join(url, invite), 1, "used");
    EXPECT_TRUE(first.running());
}

TEST(Network, AnotherMarketBehindTheSameCertificate) {
    Refusals scene;
    // The certificate is copied, so the pin is right; the market's key is not.
    std::filesystem::create_directory(scene.path("other"));
    for (const char* name : {"dev-cert.pem", "dev-key.pem"}) {
        std::filesystem::copy_file(scene.path("state/") + name, scene.path("other/") + name);
    }
    const MarketProgram other(demo_model(), scene.path("other"));
    expect_refused("another market's key", scene.join(scene.market().url(), other.worker_invite()),
                   1, "another market");
}

TEST(Network, ARevokedNodeEndsAndDoesNotComeBack) {
    Refusals scene;
    const std::string url = scene.market().url();
    Operator desk(url, scene.path("state"));
    const std::string invite =
        desk.post("/api/v1/admin/invites", {{"uses", 5}, {"role", "worker"}})["invite"];
    // One that waits for more workers than will come.
    const Program backbone = join_backbone(demo_model(), url, scene.market().backbone_invite(),
                                           scene.path("backbone"), kPrompt);
    Program worker = join_worker(url, invite, "bad", scene.path("bad"));
    ASSERT_TRUE(worker.wait_for("joined 127.0.0.1 with")) << worker.err() << backbone.err();
    const std::string id = desk.node("bad")["node"];
    const Json revoked = desk.post("/api/v1/admin/revoke", {{"node", id}});
    EXPECT_GE(revoked["tokens_revoked"], 1);
    EXPECT_EQ(desk.node("bad")["leases_serving"], 0);
    expect_refused("revoked while it serves", worker, 1, "taken back");
    expect_refused("revoked, again", join_worker(url, invite, "bad", scene.path("bad")), 1,
                   "revoked");
    Program good = join_worker(url, invite, "good", scene.path("good"));
    EXPECT_TRUE(serves(desk, "good")) << good.err();
    std::string backbone_id;
    const Json nodes = desk.get("/api/v1/nodes");
    for (const Json& node : nodes["nodes"]) {
        if (node["roles"] == Json({"backbone"})) backbone_id = node["node"];
    }
    desk.post("/api/v1/admin/revoke", {{"node", backbone_id}});
    expect_refused("a backbone, revoked while it waits", backbone, 1, "taken back");
}

// The relay runs apart from its market, is there before it, and asks it what was revoked.
TEST(Network, ARelayElsewhereHearsOfARevokedNode) {
    const ScratchFolder scratch;
    std::string url, key, pin;
    {
        MarketProgram first(demo_model(), scratch.path("state"), "127.0.0.1:0",
                            {"--relay-url", "ws://127.0.0.1:1"});
        url = first.program().word_after("--market ");
        key = first.program().word_after("--market-key ");
        pin = first.program().word_after("--market-pin ");
    }
    Program relay({KVASIR_PROGRAM, "relay", "--listen", "127.0.0.1:0", "--market-key", key,
                   "--market", url, "--market-pin", pin, "--revoked-every-s", "1", "--log-level",
                   "info"});
    ASSERT_TRUE(relay.wait_for("listening on ws://")) << relay.err();
    EXPECT_THAT(relay.err(), HasSubstr("revoked tokens are not known"));
    MarketProgram market(demo_model(), scratch.path("state"), url.substr(url.rfind('/') + 1),
                         {"--relay-url", relay.word_after("listening on ")});
    ASSERT_EQ(market.url(), url);
    const std::string invite = market.worker_invite();
    Program bad = join_worker(url, invite, "bad", scratch.path("bad"));
    Program good = join_worker(url, invite, "good", scratch.path("good"));
    Program backbone = join_backbone(demo_model(), url, market.backbone_invite(),
                                     scratch.path("backbone"), kLongPrompt);
    ASSERT_TRUE(backbone.wait_for("debug text: ")) << backbone.err() << relay.err();
    EXPECT_TRUE(relay.wait_for("says again")) << relay.err();
    Operator desk(url, scratch.path("state"));
    desk.post("/api/v1/admin/revoke", {{"node", desk.node("bad")["node"]}});
    expect_refused("revoked while it serves", bad, 1, "taken back");
    EXPECT_TRUE(relay.wait_for("code=revoked")) << relay.err();
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null()) << backbone.err();
    EXPECT_EQ(json["logits_sha256"], reference_digest(demo_model(), kLongPrompt));
    EXPECT_GT(pairs_of(json, "good"), 0u);
    EXPECT_TRUE(good.running());
}

TEST(Network, PortsOfOthers) {
    Refusals scene;
    const std::string url = scene.market().url();
    // A relay that wants tokens, without TLS so that only the token is missing.
    const std::string key = Operator(url, scene.path("state")).get("/api/v1/market")["market_key"];
    Program relay({KVASIR_PROGRAM, "relay", "--listen", "127.0.0.1:0", "--market-key", key});
    ASSERT_TRUE(relay.wait_for("listening on ws://")) << relay.err();
    const std::string hub = relay.word_after("listening on ");
    expect_refused("--connect to a port that wants tokens",
                   start_worker(hub, "w", demo_model(), "0-7:0-3"), 1, "--join");
    Program no_market({KVASIR_PROGRAM, "relay", "--listen", "127.0.0.1:0", "--open", "--dev-tls",
                       scene.path("state")});
    ASSERT_TRUE(no_market.wait_for("listening on wss://")) << no_market.err();
    const std::string wrong = "https://" + no_market.word_after("listening on wss://");
    expect_refused("--join to a relay without market",
                   scene.join(wrong, scene.market().worker_invite()), 1, "market");
    expect_refused("a backbone with --join to a relay without market",
                   join_backbone(demo_model(), wrong, scene.market().backbone_invite(),
                                 scene.path("backbone"), kPrompt),
                   1, "market");
    expect_refused("a backbone with a worker's invite",
                   join_backbone(demo_model(), url, scene.market().worker_invite(),
                                 scene.path("backbone"), kPrompt),
                   1, "backbone");
    expect_refused("a worker with a backbone's invite",
                   scene.join(url, scene.market().backbone_invite()), 1, "backbone");
}

// The invite pins the market's key; the relay, which runs elsewhere, has another certificate, and
// that is judged by the CAs.
TEST(Network, ARelayElsewhereHasACertificateOfItsOwn) {
    const ScratchFolder scratch;
    Program relay({KVASIR_PROGRAM, "relay", "--open", "--listen", "127.0.0.1:0", "--dev-tls",
                   scratch.path("relay")});
    ASSERT_TRUE(relay.wait_for("relay: listening on ")) << relay.err();
    const std::string certificate = scratch.path("relay/dev-cert.pem");
    MarketProgram market(demo_model(), scratch.path("state"), "127.0.0.1:0",
                         {"--relay-url", relay.word_after("listening on ")});
    const Program worker = join_worker(market.url(), market.worker_invite(), "w", scratch.path("w"),
                                       {.budget = "12M", .more = {"--ca", certificate}});
    const std::vector<std::string> prompt = {"--prompt-tokens", "1,2,3",           "-n", "2",
                                             "--ignore-eos",    "--wait-coverage", "1%"};
    // Nobody vouches for the relay here.
    Program alone = join_backbone(demo_model(), market.url(), market.backbone_invite(),
                                  scratch.path("backbone"), prompt);
    EXPECT_TRUE(alone.wait_for("certificate")) << alone.err();
    alone.signal(SIGKILL);
    auto with_ca = prompt;
    with_ca.insert(with_ca.end(), {"--ca", certificate});
    const Json report = report_of(join_backbone(
        demo_model(), market.url(), market.backbone_invite(), scratch.path("backbone"), with_ca));
    ASSERT_FALSE(report.is_null()) << worker.err();
    EXPECT_GT(pairs_of(report, "w"), 0u);
}

}  // namespace
}  // namespace kvasir::e2e
