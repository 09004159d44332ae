// S4: relays that stop tell their nodes where to go, and those go there: in mid-text, both sides,
// and the logits are llama.cpp's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "access/held_port_testing.hpp"
#include "network_testing.hpp"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kTokens = kMeasures ? 600 : 200;

Program open_relay(const std::string& listen, std::vector<std::string> more = {}) {
    std::vector<std::string> argv = {KVASIR_PROGRAM, "relay",       "--open", "--listen",
                                     listen,         "--log-level", "info"};
    argv.insert(argv.end(), more.begin(), more.end());
    Program relay(argv);
    EXPECT_TRUE(relay.wait_for("listening on ws://")) << relay.err();
    return relay;
}

std::string host_port(const std::string& url) {
    return url.substr(url.rfind('/') + 1);
}

TEST(Moving, BothSidesMoveInMidText) {
    const ScratchFolder scratch;
    // Wide enough that a token takes its time also where the backbone computes alone.
    const std::string model =
        synth(scratch.path("model.gguf"), {"--layers", "3", "--embd", "1024", "--ff", "1536",
                                           "--experts", "8", "--used", "8", "--type", "q8_0"});
    const std::vector<std::string> prompt = {"--prompt-tokens", "1,2,3,4", "-n",
                                             std::to_string(kTokens), "--ignore-eos"};
    const Program next = open_relay("127.0.0.1:0");
    const std::string next_url = next.word_after("listening on ");
    Program old = open_relay("127.0.0.1:0", {"--drain-s", "1", "--move-url", next_url});
    const std::string old_url = old.word_after("listening on ");
    MarketProgram market(model, scratch.path("state"), "127.0.0.1:0", {"--relay-url", old_url});
    Program a = join_worker(market.url(), market.worker_invite(), "a", scratch.path("a"),
                            {.budget = "72M", .more = {}});
    Program b = join_worker(market.url(), market.worker_invite(), "b", scratch.path("b"),
                            {.budget = "72M", .more = {}});
    Program backbone = join_backbone(model, market.url(), market.backbone_invite(),
                                     scratch.path("backbone"), prompt);
    ASSERT_TRUE(backbone.wait_for("debug text: ", 5)) << backbone.err() << a.err() << b.err();
    old.signal(SIGTERM);
    EXPECT_EQ(old.wait(60).exit_code, 0);
    EXPECT_TRUE(backbone.running()) << "the text must outlive the move, or nothing is shown";
    for (Program* worker : {&a, &b}) {
        EXPECT_TRUE(worker->wait_for("attached to " + host_port(next_url))) << worker->err();
        EXPECT_THAT(worker->err(), Not(HasSubstr("this relay stops"))) << "cut off, not gone";
    }
    const Json json = report_of(backbone);
    ASSERT_FALSE(json.is_null());
    EXPECT_THAT(backbone.err(), HasSubstr("attached to relay " + host_port(next_url)));
    EXPECT_THAT(backbone.err(), Not(HasSubstr("this relay stops")));
    expect_exact_text(json, model, prompt, kTokens);
    for (const char* name : {"a", "b"}) {
        EXPECT_GE(connections_with_work(json, name), 2u)
            << name << " worked on both sides of the move: " << json["workers"].dump(2);
    }
}

// The address that the relay names is nobody's: nodes come back to the one that they know.
TEST(Moving, NodesComeBackWhenNobodyIsThere) {
    const ScratchFolder scratch;
    // Between its two relays the port must not be somebody else's.
    const access::testing::HeldPort nowhere, here;
    Program old = open_relay(here.host_port(), {"--drain-s", "1", "--move-url", nowhere.url()});
    const std::string url = old.word_after("listening on ");
    MarketProgram market(demo_model(), scratch.path("state"), "127.0.0.1:0", {"--relay-url", url});
    Program worker = join_worker(market.url(), market.worker_invite(), "w", scratch.path("w"));
    Program backbone = join_backbone(
        demo_model(), market.url(), market.backbone_invite(), scratch.path("backbone"),
        {"--prompt-tokens", "1,2,3", "-n", "2", "--ignore-eos", "--wait-coverage", "100%"});
    ASSERT_TRUE(worker.wait_for("joined 127.0.0.1 with")) << worker.err() << backbone.err();
    old.signal(SIGTERM);
    EXPECT_EQ(old.wait(60).exit_code, 0);
    EXPECT_TRUE(worker.wait_for(nowhere.host_port() + ": ")) << worker.err();
    EXPECT_TRUE(backbone.wait_for("relay " + nowhere.host_port() + ": ")) << backbone.err();
    const Program again = open_relay(here.host_port());
    EXPECT_TRUE(worker.wait_for("joined 127.0.0.1 with", 2)) << worker.err() << backbone.err();
    EXPECT_TRUE(worker.running());
    EXPECT_TRUE(backbone.running());
}

}  // namespace
}  // namespace kvasir::e2e
