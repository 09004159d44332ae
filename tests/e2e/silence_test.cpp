// S4: `kvasir relay --ping-s --silence-s`: who answers stays for as long as it likes, who does not
// is gone in time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>

#include "net/client.hpp"
#include "run_program.hpp"

namespace kvasir::e2e {
namespace {

using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;

class SilentRelay {
public:
    SilentRelay()
        : program_({KVASIR_PROGRAM, "relay", "--listen", "127.0.0.1:0", "--open", "--ping-s", "1",
                    "--silence-s", "3"}) {
        EXPECT_TRUE(program_.wait_for("listening on ws://")) << program_.err();
        const std::string url = program_.word_after("listening on ");
        port_ = url.substr(url.rfind(':') + 1);
        auto client = net::HttpClient::make({});
        EXPECT_TRUE(client);
        client_ = std::move(*client);
    }
    Program node() const {
        Program node({KVASIR_RELAY_NODE, port_});
        EXPECT_TRUE(node.wait_for("attached"));
        return node;
    }
    std::string metrics() {
        net::HttpCall call;
        call.url = "http://127.0.0.1:" + port_ + "/metrics";
        const auto reply = client_->call(call);
        EXPECT_TRUE(reply) << (reply ? "" : reply.error().detail);
        return reply ? reply->body : std::string();
    }
    double cut_for_silence() {
        const std::string text = metrics();
        const std::string before = "kvasir_relay_cut_total{reason=\"silent\"} ";
        const size_t at = text.find(before);
        EXPECT_NE(at, std::string::npos) << text;
        return at == std::string::npos ? -1 : std::stod(text.substr(at + before.size()));
    }

private:
    Program program_;
    std::string port_;
    std::unique_ptr<net::HttpClient> client_;
};

TEST(Relay, PingsAsOftenAsItIsToldAndKeepsWhoAnswers) {
    SilentRelay relay;
    const Program node = relay.node();
    EXPECT_THAT(node.out(), HasSubstr("attached ping 1000")) << "nodes are told, too";
    const auto end = Clock::now() + std::chrono::seconds(7);  // twice the silence
    eventually([&] { return Clock::now() >= end; });
    EXPECT_TRUE(node.running()) << node.out();
    EXPECT_EQ(relay.cut_for_silence(), 0);
    EXPECT_THAT(relay.metrics(), HasSubstr("kvasir_relay_connections 1"));
}

TEST(Relay, ANodeThatIsSilentForLongerIsGone) {
    SilentRelay relay;
    const Program node = relay.node();
    const auto begin = Clock::now();
    node.signal(SIGSTOP);
    EXPECT_TRUE(eventually([&] { return relay.cut_for_silence() == 1; }, 30));
    EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(1900));
    EXPECT_LE(Clock::now() - begin, std::chrono::seconds(30)) << "a minute without the flag";
}

}  // namespace
}  // namespace kvasir::e2e
