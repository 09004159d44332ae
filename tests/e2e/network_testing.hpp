// A swarm's middle and its workers as separate programs, for the tests of the whole network.
//
// Used by the end-to-end tests. Thread: one owner. Owns: its processes.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "access/held_port_testing.hpp"
#include "net/client.hpp"
#include "swarm_testing.hpp"

namespace kvasir::e2e {

// Plain llama.cpp's digest of the logits for these flags of `kvasir run`.
std::string reference_digest(const std::string& model, const std::vector<std::string>& prompt);

// The report of a text of `tokens` tokens: what plain llama.cpp says, bit for bit.
void expect_exact_text(const Json& report, const std::string& model,
                       const std::vector<std::string>& prompt, size_t tokens);

// The connections of that worker (a row of the report each) that had work.
size_t connections_with_work(const Json& report, const std::string& name);

// One with `kvasir market` and its relay, behind a self-signed certificate.
class MarketProgram {
public:
    // `where` is what `--listen` takes; 127.0.0.1:0 is a port that stays its own while it is dead.
    MarketProgram(std::string model, std::string state, const std::string& where = "127.0.0.1:0",
                  std::vector<std::string> more = {});

    Program& program() { return program_; }
    const Program& program() const { return program_; }
    const std::string& url() const { return url_; }
    std::string port() const { return url_.substr(url_.rfind(':') + 1); }
    const std::string& worker_invite() const { return worker_invite_; }
    const std::string& backbone_invite() const { return backbone_invite_; }

    // kill -9.
    void kill();
    // Another one with the same address, state and database; its invites are others.
    void restart();
    void kill_and_restart();

private:
    void start(const std::string& where);

    const access::testing::HeldPort here_;
    const std::string model_;
    const std::string state_;
    const std::vector<std::string> more_;
    Program program_;
    std::string url_;
    std::string worker_invite_, backbone_invite_;
};

// A long way to the market (or relay): a worker at its end that holds an expert sets the pace of a
// text, as each token costs at least a round trip to it, however fast the machine is.
struct FarLine {
    Program program;
    std::string url;

    FarLine(const std::string& market_url, const std::string& rtt_ms)
        : program({KVASIR_WAN, "--to", market_url.substr(market_url.rfind('/') + 1), "--rtt-ms",
                   rtt_ms, "--jitter-ms", "0", "--mbit", "500"}) {
        EXPECT_TRUE(program.wait_for("listening "));
        url = "https://127.0.0.1:" + program.word_after("listening ");
    }
};

// A market, and a `kvasir relay` of its own (without TLS) that asks it every second what was
// revoked. The relay was there first. With `rtt_ms` everybody has a long way to the relay.
class RelayElsewhere {
public:
    RelayElsewhere(const std::string& model, const std::string& state,
                   const std::string& log_level = "info",
                   const std::vector<std::string>& market_more = {},
                   const std::string& rtt_ms = {});

    Program& relay() { return relay_; }
    MarketProgram& market() { return *market_; }
    // Only with `rtt_ms`.
    const FarLine& line() const { return *line_; }
    // kill -9 of the relay alone, and another one with the same address.
    void kill_and_restart_relay();

private:
    void start_relay();

    // Theirs also while they are dead.
    const access::testing::HeldPort market_here_, relay_here_;
    std::vector<std::string> command_;  // of the relay, but for --listen
    Program relay_;
    std::optional<FarLine> line_;
    std::unique_ptr<MarketProgram> market_;
};

// What the operator of the market behind `url` sees and does; its secret is in the folder `state`.
class Operator {
public:
    Operator(std::string url, const std::string& state);
    // Null (and a test failure) unless the answer has status 200.
    Json get(const std::string& path) { return call("GET", path, {}); }
    Json post(const std::string& path, const Json& body) { return call("POST", path, body.dump()); }
    // The body as it is; empty (and a test failure) unless the answer has status 200.
    std::string text(const std::string& path) { return send("GET", path, {}).value_or(""); }
    // The row of the node of that name in /api/v1/nodes; null if there is none.
    Json node(const std::string& name);
    // Waits until its leases are proven, also where no backbone is there to say hello to.
    bool serves(const std::string& name);
    // Every expert is held by a proven worker with a live lease.
    bool all_served();

private:
    Json call(const std::string& method, const std::string& path, const std::string& body);
    std::optional<std::string> send(const std::string& method, const std::string& path,
                                    const std::string& body);

    const std::string url_;
    std::string secret_;
    std::unique_ptr<net::HttpClient> client_;
};

struct JoinOptions {
    std::string budget = "12M";
    std::vector<std::string> more;
};
// `kvasir worker --join URL --invite CODE --name NAME --cache FOLDER`, at info level.
Program join_worker(const std::string& url, const std::string& invite, const std::string& name,
                    const std::string& cache, const JoinOptions& options = {});

// The only slice in a worker's cache; empty (and a test failure) unless there is exactly one.
std::string slice_in(const std::string& cache);

// `kvasir run --join` in the background, at debug level, which shows every piece of text.
Program join_backbone(const std::string& model, const std::string& url, const std::string& invite,
                      const std::string& state, const std::vector<std::string>& prompt);
// Waits for the end of a program that prints a report; null (and a test failure) unless it ends
// well.
Json report_of(const Program& program, unsigned seconds = 240);

}  // namespace kvasir::e2e
