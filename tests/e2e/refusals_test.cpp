// Who is refused, and why: invites, keys, tokens and ports of others; nodes that are revoked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<std::string> kPrompt = {"-p", "Once upon a time", "-n", "64"};

// A text that lives until a revoked node has gone.
const std::vector<std::string> kLongPrompt = {"--prompt-tokens", "1,2,3,4", "-n",
                                              kMeasures ? "900" : "300", "--ignore-eos"};

// A worker that does not get in ends by itself, with a reason for people.
void expect_refused(const std::string& what, const Program& worker, int exit_code,
                    const std::string& says) {
    SCOPED_TRACE(what);
    const Outcome ended = worker.wait(60);
    EXPECT_EQ(ended.exit_code, exit_code) << ended.err;
    EXPECT_THAT(ended.err, HasSubstr(says));
    EXPECT_THAT(ended.err, HasSubstr("kvasir: "));
    EXPECT_THAT(ended.err, Not(ContainsRegex("(^|\n)load_backend"))) << "for the log";
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

TEST(Refused, InvitesThatAreRefused) {
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

TEST(Refused, AnotherMarketBehindTheSameCertificate) {
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

TEST(Refused, ARevokedNodeEndsAndDoesNotComeBack) {
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
    EXPECT_TRUE(desk.serves("good")) << good.err();
    std::string backbone_id;
    const Json nodes = desk.get("/api/v1/nodes");
    for (const Json& node : nodes["nodes"]) {
        if (node["roles"] == Json({"backbone"})) backbone_id = node["node"];
    }
    desk.post("/api/v1/admin/revoke", {{"node", backbone_id}});
    expect_refused("a backbone, revoked while it waits", backbone, 1, "taken back");
}

// The relay runs apart from its market, is there before it, and asks it what was revoked.
TEST(Refused, ARelayElsewhereHearsOfARevokedNode) {
    const ScratchFolder scratch;
    RelayElsewhere swarm(demo_model(), scratch.path("state"));
    Program& relay = swarm.relay();
    EXPECT_THAT(relay.err(), HasSubstr("revoked tokens are not known"));
    MarketProgram& market = swarm.market();
    const std::string url = market.url();
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

TEST(Refused, PortsOfOthers) {
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

TEST(Refused, AMarketWithAnotherKeyThanItsRelayPins) {
    Refusals scene;
    const std::string url = scene.market().url();
    const std::string key = Operator(url, scene.path("state")).get("/api/v1/market")["market_key"];
    Program relay({KVASIR_PROGRAM, "relay", "--listen", "127.0.0.1:0", "--market-key", key,
                   "--market", url, "--market-pin", std::string(64, '0')});
    EXPECT_TRUE(relay.wait_for("check the address and --market-pin")) << relay.err();
}

// The invite pins the market's key; the relay, which runs elsewhere, has another certificate, and
// that is judged by the CAs.
TEST(Refused, ARelayElsewhereHasACertificateOfItsOwn) {
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
    // Nobody vouches for the relay here. What a worker says last is why it serves nobody.
    {
        Program kept_out = join_worker(market.url(), market.worker_invite(), "out",
                                       scratch.path("out"), {.budget = "6M", .more = {}});
        EXPECT_TRUE(kept_out.wait_for("the certificate is not accepted")) << kept_out.err();
        EXPECT_TRUE(kept_out.wait_for("computed 0 pairs", 3)) << kept_out.err();  // tries
        const std::string all = kept_out.err() + kept_out.out();
        const size_t first = all.find("worker: serving ");
        EXPECT_NE(first, std::string::npos) << all;
        EXPECT_EQ(all.find("worker: serving ", first + 1), std::string::npos) << all;
    }
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
