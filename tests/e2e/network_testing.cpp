#include "network_testing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <utility>

namespace kvasir::e2e {

std::string reference_digest(const std::string& model, const std::vector<std::string>& prompt) {
    std::vector<std::string> arguments = {"run", "-m", model, "--monolithic"};
    arguments.insert(arguments.end(), prompt.begin(), prompt.end());
    const Json json = run_json(arguments);
    return json.is_null() ? std::string() : json["logits_sha256"].get<std::string>();
}

void expect_exact_text(const Json& report, const std::string& model,
                       const std::vector<std::string>& prompt, size_t tokens) {
    EXPECT_EQ(report["logits_sha256"], reference_digest(model, prompt));
    EXPECT_EQ(report["tokens"].size(), tokens);
    EXPECT_EQ(report["answers"], "exact");
}

size_t connections_with_work(const Json& report, const std::string& name) {
    size_t count = 0;
    for (const Json& worker : report["workers"]) {
        const bool is_its = worker["id"].get<std::string>().rfind(name + "#", 0) == 0;
        if (is_its && worker["pairs"].get<uint64_t>() > 0) ++count;
    }
    return count;
}

MarketProgram::MarketProgram(std::string model, std::string state, const std::string& where,
                             std::vector<std::string> more)
    : model_(std::move(model)),
      state_(std::move(state)),
      more_(std::move(more)),
      program_({"/bin/true"}) {
    start(where == "127.0.0.1:0" ? here_.host_port() : where);
}

void MarketProgram::start(const std::string& where) {
    std::vector<std::string> argv = {
        KVASIR_PROGRAM, "market",         "-m",     model_,           "--listen", where, "--state",
        state_,         "--print-invite", "worker", "--print-invite", "backbone"};
    if (std::ranges::find(more_, "--plain") == more_.end()) argv.push_back("--dev-tls");
    argv.insert(argv.end(), more_.begin(), more_.end());
    program_ = Program(argv);
    EXPECT_TRUE(program_.wait_for("invite backbone: ")) << program_.err();
    url_ = program_.word_after("market: ");
    worker_invite_ = program_.word_after("invite worker: ");
    backbone_invite_ = program_.word_after("invite backbone: ");
}

void MarketProgram::kill() {
    program_.signal(SIGKILL);
    program_.wait();
}

void MarketProgram::restart() {
    start("127.0.0.1:" + port());
}

void MarketProgram::kill_and_restart() {
    kill();
    restart();
}

RelayElsewhere::RelayElsewhere(const std::string& model, const std::string& state,
                               const std::string& log_level,
                               const std::vector<std::string>& market_more,
                               const std::string& rtt_ms)
    : relay_({"/bin/true"}) {
    std::string url;
    {
        MarketProgram first(model, state, market_here_.host_port(),
                            {"--relay-url", "ws://127.0.0.1:1"});
        url = first.url();
        command_ = {KVASIR_PROGRAM,      "relay",
                    "--market",          first.program().word_after("--market "),
                    "--market-key",      first.program().word_after("--market-key "),
                    "--market-pin",      first.program().word_after("--market-pin "),
                    "--revoked-every-s", "1",
                    "--log-level",       log_level};
    }
    start_relay();
    std::string to_relay = relay_.word_after("listening on ");
    if (!rtt_ms.empty()) {
        line_.emplace(to_relay, rtt_ms);
        to_relay = "ws://" + line_->url.substr(line_->url.rfind('/') + 1);
    }
    std::vector<std::string> more = {"--relay-url", to_relay};
    more.insert(more.end(), market_more.begin(), market_more.end());
    market_ = std::make_unique<MarketProgram>(model, state, market_here_.host_port(), more);
    EXPECT_EQ(market_->url(), url);
}

void RelayElsewhere::start_relay() {
    std::vector<std::string> argv = command_;
    argv.insert(argv.end(), {"--listen", relay_here_.host_port()});
    relay_ = Program(argv);
    EXPECT_TRUE(relay_.wait_for("listening on ws://")) << relay_.err();
}

void RelayElsewhere::kill_and_restart_relay() {
    relay_.signal(SIGKILL);
    relay_.wait();
    start_relay();
}

Operator::Operator(std::string url, const std::string& state) : url_(std::move(url)) {
    std::ifstream file(state + "/operator.secret");
    std::getline(file, secret_);
    EXPECT_FALSE(secret_.empty()) << state << " has no operator.secret";
    net::ClientTrust trust;
    if (url_.starts_with("https://")) trust.ca_file = state + "/dev-cert.pem";
    auto client = net::HttpClient::make(trust);
    EXPECT_TRUE(client) << client.error().detail;
    if (client) client_ = std::move(*client);
}

Json Operator::call(const std::string& method, const std::string& path, const std::string& body) {
    const auto reply = send(method, path, body);
    return reply ? Json::parse(*reply) : Json();
}

std::optional<std::string> Operator::send(const std::string& method, const std::string& path,
                                          const std::string& body) {
    if (!client_) return std::nullopt;
    net::HttpCall call;
    call.method = method;
    call.url = url_ + path;
    call.secret_headers = {{"Authorization", "Bearer " + secret_}};
    call.body = body;
    if (!body.empty()) call.headers = {{"Content-Type", "application/json"}};
    const auto reply = client_->call(call);
    if (!reply || reply->status != 200) {
        ADD_FAILURE() << path << ": " << (reply ? reply->body : reply.error().detail);
        return std::nullopt;
    }
    return reply->body;
}

Json Operator::node(const std::string& name) {
    const Json all = get("/api/v1/nodes");
    if (all.is_null()) return nullptr;
    for (const Json& node : all["nodes"]) {
        if (node["name"] == name) return node;
    }
    return nullptr;
}

bool Operator::serves(const std::string& name) {
    return eventually([&] {
        const Json row = node(name);
        return !row.is_null() && row["leases_serving"] > 0 && row["leases_loading"] == 0;
    });
}

bool Operator::all_served() {
    const Json map = get("/api/v1/coverage");
    return !map.is_null() && map["experts_serving"] == map["experts"];
}

Program join_worker(const std::string& url, const std::string& invite, const std::string& name,
                    const std::string& cache, const JoinOptions& options) {
    std::vector<std::string> argv = {
        KVASIR_PROGRAM, "worker",  "--join", url,        "--invite",     invite,        "--name",
        name,           "--cache", cache,    "--budget", options.budget, "--log-level", "info"};
    argv.insert(argv.end(), options.more.begin(), options.more.end());
    return Program(argv);
}

std::string slice_in(const std::string& cache) {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(cache)) {
        if (entry.path().extension() == ".gguf") found.push_back(entry.path());
    }
    EXPECT_EQ(found.size(), 1u) << "slices in " << cache;
    return found.size() == 1 ? found.front() : std::string();
}

Program join_backbone(const std::string& model, const std::string& url, const std::string& invite,
                      const std::string& state, const std::vector<std::string>& prompt) {
    std::vector<std::string> argv = {
        KVASIR_PROGRAM, "run",     "-m",  model,    "--join",      url,    "--invite",
        invite,         "--state", state, "--json", "--log-level", "debug"};
    argv.insert(argv.end(), prompt.begin(), prompt.end());
    return Program(argv);
}

Json report_of(const Program& program, unsigned seconds) {
    const Outcome outcome = program.wait(seconds);
    const std::string end =
        outcome.err.substr(outcome.err.size() - std::min<size_t>(outcome.err.size(), 4000));
    EXPECT_EQ(outcome.exit_code, 0) << end;
    if (!Json::accept(outcome.out)) {
        ADD_FAILURE() << "not JSON: " << outcome.out << end;
        return nullptr;
    }
    return Json::parse(outcome.out);
}

}  // namespace kvasir::e2e
