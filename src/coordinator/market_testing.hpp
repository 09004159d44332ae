// A market over a toy model, clocks that tests move, and nodes that speak its API in process.
//
// Used by coordinator's tests only. Thread: one, where a test does not say otherwise. Owns: a
// scratch folder with model, database and keys.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/encoding.hpp"
#include "coordinator/market.hpp"
#include "crypto/hash.hpp"
#include "moe/slice_testing.hpp"

namespace kvasir::coordinator::testing {

using namespace std::chrono_literals;
using Json = nlohmann::json;

struct Clock {
    std::atomic<int64_t> steady_ms{1000000};
    std::atomic<int64_t> wall_s{1800000000};
    Clocks clocks() {
        Clocks out;
        out.steady = [this] { return TimePoint(std::chrono::milliseconds(steady_ms)); };
        out.wall = [this] { return crypto::WallTime(std::chrono::seconds(wall_s)); };
        return out;
    }
    void pass(std::chrono::seconds time) {  // what time does
        steady_ms += std::chrono::milliseconds(time).count();
        wall_s += time.count();
    }
};

struct Reply {
    int status = 0;
    Json json;         // null if the body is none
    std::string body;  // read from the file, where the answer is one
    net::HttpResponse response;

    std::string code() const { return json.contains("error") ? json["error"]["code"] : ""; }
    std::string message() const { return json.contains("error") ? json["error"]["message"] : ""; }
    std::string header(const std::string& name) const {
        for (const auto& [key, value] : response.headers) {
            if (key == name) return value;
        }
        return "";
    }
};

inline std::string read_body(const net::FileBody& file) {
    std::string out(file.bytes, '\0');
    size_t done = 0;
    while (done < out.size()) {
        const ssize_t got = ::pread(*file.fd, out.data() + done, out.size() - done,
                                    static_cast<off_t>(file.offset + done));
        if (got <= 0) break;
        done += static_cast<size_t>(got);
    }
    return out.substr(0, done);
}

inline Reply call(const net::HttpHandler& handler, net::HttpRequest request) {
    auto promise = std::make_shared<std::promise<net::HttpResponse>>();
    auto answer = promise->get_future();
    handler(std::move(request),
            [promise](net::HttpResponse response) { promise->set_value(std::move(response)); });
    Reply reply;
    if (answer.wait_for(60s) != std::future_status::ready) {
        ADD_FAILURE() << "no answer";
        return reply;
    }
    reply.response = answer.get();
    reply.status = reply.response.status;
    const auto& file = reply.response.file;
    reply.body = file ? read_body(*file) : reply.response.body;
    if (!file) reply.json = Json::parse(reply.body, nullptr, false);
    if (reply.json.is_discarded()) reply.json = Json();
    // As the network layer would.
    if (reply.response.on_sent) reply.response.on_sent(reply.body.size());
    return reply;
}

inline net::HttpRequest make_request(const std::string& method, const std::string& path,
                                     const std::string& body = "", const std::string& bearer = "") {
    net::HttpRequest request;
    request.method = method;
    request.path = path;
    request.body = body;
    request.peer_address = "192.0.2.1";
    if (!bearer.empty()) request.headers["authorization"] = "Bearer " + bearer;
    return request;
}

class MarketTest : public ::testing::Test {
protected:
    MarketTest() {
        moe::testing::ToyShape shape;
        shape.layers = 2;
        shape.experts = 8;
        shape.splits = 2;
        model_path_ = moe::testing::write_toy(folder_, shape);
        options_.model_path = model_path_;
        options_.db_path = folder_ / "market.db";
        options_.key_path = folder_ / "market.key";
        options_.cache_dir = folder_ / "cache";
        options_.name = "a market";
        options_.clocks = clock_.clocks();
    }
    void open() {
        market_.reset();
        auto market = Market::open(options_);
        ASSERT_TRUE(market) << market.error().detail;
        market_ = std::move(*market);
        handler_ = market_->handler();
    }
    Reply send(const std::string& method, const std::string& path, const std::string& body = "",
               const std::string& bearer = "") {
        return call(handler_, make_request(method, path, body, bearer));
    }
    std::string operator_secret() {
        const auto bytes = moe::testing::read_file(options_.db_path + ".operator");
        return std::string(bytes.begin(), bytes.end() - 1);
    }
    moe::Model model() { return moe::testing::open_toy(model_path_); }

    moe::testing::ScratchFolder folder_;
    Clock clock_;
    std::string model_path_;
    MarketOptions options_;
    std::unique_ptr<Market> market_;
    net::HttpHandler handler_;
};

// A node as a worker would be, without the bytes.
class Node {
public:
    explicit Node(net::HttpHandler& handler) : handler_(handler) {
        auto key = crypto::KeyPair::generate();
        KVASIR_CHECK(key.has_value());
        key_ = std::make_unique<crypto::KeyPair>(std::move(*key));
    }
    const crypto::KeyPair& key() const { return *key_; }
    std::string id() const { return crypto::to_hex(key_->public_key()); }

    Reply post(const std::string& path, const Json& body, const std::string& method = "POST") {
        return call(handler_, make_request(method, path, body.dump(), token));
    }
    std::vector<uint8_t> challenge() {
        const Reply reply = call(handler_, make_request("POST", "/api/v1/challenge", "{}"));
        return decode_hex(reply.json.at("challenge").get<std::string>()).value();
    }
    Json enroll_body(const crypto::Invite& invite, const std::string& name) {
        const auto given = challenge();
        std::vector<uint8_t> statement = given;
        statement.insert(statement.end(), invite.secret.begin(), invite.secret.end());
        return {{"invite", crypto::to_string(invite)},
                {"public_key", id()},
                {"name", name},
                {"challenge", encode_hex(given)},
                {"signature", encode_hex(key_->sign("register", statement))}};
    }
    Reply enroll(const crypto::Invite& invite, const std::string& name = "phone") {
        Reply reply = post("/api/v1/nodes", enroll_body(invite, name));
        if (reply.status == 200) token = reply.json.at("token");
        return reply;
    }
    Json renew_body() {
        const auto given = challenge();
        return {{"public_key", id()},
                {"challenge", encode_hex(given)},
                {"signature", encode_hex(key_->sign("renew", given))}};
    }
    Reply renew() {
        Reply reply = post("/api/v1/nodes/renew", renew_body());
        if (reply.status == 200) token = reply.json.at("token");
        return reply;
    }
    Reply ask(uint64_t budget, const Json& have = Json::array()) {
        return post("/api/v1/leases", {{"budget_bytes", budget}, {"have", have}, {"threads", 2}});
    }
    Reply heartbeat(const std::vector<uint64_t>& ids) {
        return post("/api/v1/heartbeat", {{"serving", ids}});
    }
    Reply data(const std::string& model_id, const std::string& shard, const std::string& range) {
        auto request = make_request("GET", "/models/" + model_id + "/data/" + shard, "", token);
        if (!range.empty()) request.headers["range"] = range;
        return call(handler_, std::move(request));
    }
    // The two calls of a proof; `spoil` makes the answers for that lease wrong.
    Reply prove(const std::vector<uint64_t>& ids, const Json& leases, const moe::Model& model,
                uint64_t spoil = 0) {
        const Reply asked = post("/api/v1/leases/prove", {{"leases", ids}});
        if (asked.status != 200) return asked;
        Json answers = Json::array();
        for (const Json& probe : asked.json.at("probes")) {
            answers.push_back(
                answer(asked.json.at("nonce"), probe, leases, model, probe.at("lease") == spoil));
        }
        return post("/api/v1/leases/prove",
                    {{"nonce", asked.json.at("nonce")}, {"answers", answers}});
    }

    std::string token;

private:
    static std::string answer(const std::string& nonce, const Json& probe, const Json& leases,
                              const moe::Model& model, bool is_spoilt) {
        LayerKey layer;
        for (const Json& lease : leases) {
            if (lease.at("id") != probe.at("lease")) continue;
            layer = {lease.at("layer"), lease.at("bank")};
            EXPECT_GE(probe.at("expert"), lease.at("begin"));
            EXPECT_LT(probe.at("expert"), lease.at("end"));
        }
        const moe::SlabTensor& tensor = model.find_bank(layer)->tensors.at(probe.at("tensor"));
        const auto slab = moe::testing::slab(model, tensor, probe.at("expert"));
        crypto::Hasher hasher;
        hasher.update(decode_hex(nonce).value());
        hasher.update(std::span<const uint8_t>(slab).subspan(probe.at("offset").get<size_t>(),
                                                             probe.at("bytes").get<size_t>()));
        if (is_spoilt) hasher.update(std::vector<uint8_t>{0});
        return to_hex(hasher.finish());
    }

    net::HttpHandler& handler_;
    std::unique_ptr<crypto::KeyPair> key_;
};

inline std::vector<uint64_t> ids_of(const Json& leases) {
    std::vector<uint64_t> out;
    for (const Json& lease : leases) out.push_back(lease.at("id"));
    return out;
}

}  // namespace kvasir::coordinator::testing
