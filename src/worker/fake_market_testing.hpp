// A market, its bytes and a relay on one TLS port, scripted: what an agent's tests join.
//
// It keeps the rules of the API (signatures, bearer tokens, ranges within leases) and breaks them
// where a test says so. Used by *_test.cpp only. Thread: fields under mu(), see with(). Owns: the
// listener. Limits: failures of its own abort with KVASIR_CHECK.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "access/access.hpp"
#include "base/encoding.hpp"
#include "crypto/hash.hpp"
#include "net/upgrade.hpp"
#include "wire/attach.hpp"
#include "worker/fetch_testing.hpp"

namespace kvasir::worker::testing {

using Json = nlohmann::json;
using namespace std::chrono_literals;

class FakeMarket {
public:
    static crypto::KeyPair key_of(uint8_t number) {
        std::array<uint8_t, 32> seed = {};
        seed.fill(number);
        return std::move(*crypto::KeyPair::from_seed(seed));
    }
    struct Lease {
        uint64_t id = 0;
        Segment segment;
    };
    // What a test looks at and changes.
    struct State {
        const ToyModel* toy = nullptr;
        crypto::KeyPair outline_key = key_of(1);  // signs the outline
        crypto::KeyPair shown_key = key_of(1);    // is in the description
        std::vector<Segment> offer;
        std::vector<Lease> leases;
        std::vector<Segment> have;  // of the last ask
        uint64_t budget_asked = 0;
        uint64_t id_next = 1;
        std::vector<uint64_t> serving;
        bool is_known = false;
        bool is_revoked = false;
        bool spoils_bytes = false;
        bool is_behind_a_broken_proxy = false;
        std::string node_key;
        std::vector<std::string> calls;  // "POST /api/v1/leases"
        uint64_t bytes_served = 0;
        uint64_t ranges_served = 0;
        uint64_t ranges_outside = 0;
        uint64_t attached = 0;
        std::vector<std::unique_ptr<net::MessageStream>> nodes;
    };

    FakeMarket(const ToyModel& toy, std::vector<Segment> offer) : key_(key_of(1)) {
        state_.toy = &toy;
        state_.offer = std::move(offer);
        auto tls = net::TlsServer::self_signed(folder_ / "tls");
        KVASIR_CHECK(tls.has_value());
        tls_ = *tls;
        open(0);
    }
    template <class Do>
    auto with(Do&& act) {
        const std::lock_guard lock(mu_);
        return act(state_);
    }
    ~FakeMarket() { close(); }

    void close() {
        listener_.reset();
        with([](State& state) { state.nodes.clear(); });
    }
    void reopen() { open(port_); }
    std::string url() const { return "https://127.0.0.1:" + std::to_string(port_); }
    crypto::Invite invite() const {
        crypto::Invite invite;
        invite.secret.fill(7);
        invite.market = key_.public_key();
        invite.tls_pin = tls_->pin();
        return invite;
    }
    // Looks again whenever something was asked, and now and then.
    bool eventually(const std::function<bool(State&)>& is_so, std::chrono::seconds within = 20s) {
        std::unique_lock lock(mu_);
        const auto deadline = std::chrono::steady_clock::now() + within;
        while (!is_so(state_)) {
            if (std::chrono::steady_clock::now() > deadline) return false;
            changed_.wait_for(lock, 20ms);
        }
        return true;
    }
    uint64_t count(const std::string& call) {
        return with([&](State& state) {
            return static_cast<uint64_t>(std::ranges::count(state.calls, call));
        });
    }

private:
    void open(uint16_t port) {
        net::Endpoint at;
        at.host = "127.0.0.1";
        at.port = port;
        net::ListenerOptions options;
        options.tls = tls_;
        options.http = [this](const net::HttpRequest& request, const net::Respond& respond) {
            const std::lock_guard lock(mu_);
            state_.calls.push_back(request.method + " " + request.path);
            respond(answer(request));
            changed_.notify_all();
        };
        auto listener = net::Listener::make(
            at,
            [this](net::MessageStream stream, const std::string&) { attach(std::move(stream)); },
            options);
        KVASIR_CHECK(listener.has_value());
        listener_ = std::move(*listener);
        port_ = listener_->port();
    }

    // The relay's side of ATTACH; small enough for the listener's thread.
    void attach(net::MessageStream stream) {
        const auto deadline = net::Clock::now() + 5s;
        wire::Nonce nonce = {};
        nonce.fill(3);
        KVASIR_CHECK(stream.enqueue(wire::encode_nonce(nonce)).has_value());
        if (!stream.flush_until(deadline)) return;
        const auto role = stream.receive(deadline);
        const auto message = stream.receive(deadline);
        if (!role || !message) return;
        const auto frame = wire::decode_frame(*message);
        const auto attach = frame ? wire::decode_attach(frame->payload)
                                  : Result<wire::Attach>(tl::unexpected(frame.error()));
        if (!attach) return;
        const auto now =
            std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
        const auto claims = access::check(*attach, wire::Role::kWorker, &nonce, key_.public_key(),
                                          now, std::chrono::seconds(60));
        const std::lock_guard lock(mu_);
        if (!claims || state_.is_revoked) {
            (void)stream.enqueue(wire::encode_error(
                {claims ? Errc::kRevoked : claims.error().code, "revoked, or wrong"}, 0));
            (void)stream.flush_until(deadline);
            return;
        }
        wire::Attached attached;
        attached.message_bytes_max = 64 << 20;
        attached.token_left_ms = 3600000;
        KVASIR_CHECK(stream.enqueue(wire::encode_attached(attached)).has_value());
        (void)stream.flush_until(deadline);
        ++state_.attached;
        state_.nodes.push_back(std::make_unique<net::MessageStream>(std::move(stream)));
        changed_.notify_all();
    }

    static net::HttpResponse json(const Json& body) {
        net::HttpResponse response;
        response.body = body.dump();
        return response;
    }
    static net::HttpResponse refuse(Errc code, const std::string& why) {
        return net::error_response({code, why});
    }

    net::HttpResponse answer(const net::HttpRequest& request) {
        if (state_.is_behind_a_broken_proxy) {
            net::HttpResponse page;
            page.status = 502;
            page.body = "<html><h1>Bad Gateway</h1>nginx</html>";
            return page;
        }
        const std::string& path = request.path;
        const ToyModel& toy = *state_.toy;
        const std::string model = "/models/" + to_hex(toy.manifest.model_id);
        if (path == "/api/v1/market") return describe(model);
        if (path == "/api/v1" + model + "/outline") {
            net::HttpResponse response;
            response.body.assign(toy.bytes.begin(), toy.bytes.end());
            response.headers.emplace_back(
                "Kvasir-Signature", encode_hex(state_.outline_key.sign("outline", toy.bytes)));
            return response;
        }
        if (path == "/api/v1/challenge") return json({{"challenge", "0011aabb"}});
        if (path == "/api/v1/nodes" || path == "/api/v1/nodes/renew") return grant(request);
        if (request.bearer() != token_) return refuse(Errc::kExpired, "not this token");
        if (state_.is_revoked) return refuse(Errc::kRevoked, "the operator revoked this node");
        if (path.rfind(model + "/data/", 0) == 0)
            return data(request, static_cast<uint32_t>(std::stoul(path.substr(model.size() + 6))));
        if (path == "/api/v1/leases" && request.method == "DELETE") {
            state_.leases.clear();
            return json({{"released", 1}});
        }
        return leases(path, Json::parse(request.body));
    }

    net::HttpResponse describe(const std::string& model) {
        const ToyModel& toy = *state_.toy;
        return json({{"name", "fake"},
                     {"market_key", crypto::to_hex(state_.shown_key.public_key())},
                     {"model", {{"id", to_hex(toy.manifest.model_id)}, {"name", "toy"}}},
                     {"outline",
                      {{"path", "/api/v1" + model + "/outline"},
                       {"bytes", toy.bytes.size()},
                       {"sha256", to_hex(crypto::sha256(toy.bytes))}}},
                     {"data", {{"path", model + "/data/{shard}"}}}});
    }

    net::HttpResponse grant(const net::HttpRequest& request) {
        const Json body = Json::parse(request.body);
        const auto node = crypto::parse_public_key(body["public_key"].get<std::string>());
        const bool is_renewal = request.path.ends_with("renew");
        std::vector<uint8_t> statement = {0x00, 0x11, 0xaa, 0xbb};
        if (!is_renewal) statement.insert(statement.end(), 16, 7);
        crypto::Signature signature = {};
        const auto bytes = decode_hex(body["signature"].get<std::string>());
        KVASIR_CHECK(node && bytes && bytes->size() == signature.size());
        std::ranges::copy(*bytes, signature.begin());
        if (!crypto::verify(*node, is_renewal ? "renew" : "register", statement, signature))
            return refuse(Errc::kDenied, "the signature is wrong");
        if (state_.is_revoked) return refuse(Errc::kRevoked, "the operator revoked this node");
        if (is_renewal && !state_.is_known) return refuse(Errc::kNotFound, "no such node");
        if (!is_renewal && body["invite"] != crypto::to_string(invite()))
            return refuse(Errc::kDenied, "no such invite");
        state_.is_known = true;
        state_.node_key = body["public_key"];
        crypto::TokenClaims claims;
        claims.node = *node;
        claims.name = "n";
        claims.serial = ++serial_;
        claims.issued =
            std::chrono::time_point_cast<std::chrono::seconds>(std::chrono::system_clock::now());
        claims.expires = claims.issued + std::chrono::hours(1);
        token_ = crypto::issue_token(key_, claims);
        return json({{"node", state_.node_key},
                     {"token", token_},
                     {"expires_in_s", 3600},
                     {"renew_in_s", 2700}});
    }

    Json news(const Json& ids) {
        Json leases = Json::array();
        Json lost = Json::array();
        for (const Json& id : ids) {
            if (std::ranges::find(state_.leases, id.get<uint64_t>(), &Lease::id) !=
                state_.leases.end()) {
                leases.push_back({{"id", id}, {"expires_in_s", 60}});
            } else {
                lost.push_back(id);
            }
        }
        return {{"leases", leases}, {"lost", lost}};
    }

    net::HttpResponse leases(const std::string& path, const Json& body) {
        if (path == "/api/v1/leases") {
            state_.budget_asked = body["budget_bytes"];
            state_.have.clear();
            for (const Json& one : body["have"])
                state_.have.push_back({{one["layer"], one["bank"]}, one["begin"], one["end"]});
            std::vector<Lease> now;
            for (const Segment& segment : state_.offer) {
                const auto old = std::ranges::find(state_.leases, segment, &Lease::segment);
                now.push_back(old != state_.leases.end() ? *old : Lease{state_.id_next++, segment});
            }
            state_.leases = now;
            Json list = Json::array();
            for (const Lease& lease : now) {
                list.push_back({{"id", lease.id},
                                {"layer", lease.segment.layer.layer},
                                {"bank", lease.segment.layer.bank},
                                {"begin", lease.segment.begin},
                                {"end", lease.segment.end},
                                {"bytes", bytes(lease.segment)},
                                {"expires_in_s", 60}});
            }
            return json({{"leases", list}, {"heartbeat_every_s", 1}});
        }
        if (path == "/api/v1/leases/progress") {
            Json ids = Json::array();
            for (const Json& one : body["leases"]) ids.push_back(one["id"]);
            return json(news(ids));
        }
        if (path == "/api/v1/leases/prove") return prove(body);
        if (path == "/api/v1/heartbeat") {
            state_.serving = body["serving"].get<std::vector<uint64_t>>();
            return json(news(body["serving"]));
        }
        return refuse(Errc::kNotFound, "no such thing");
    }

    uint64_t bytes(const Segment& segment) const {
        return state_.toy->model.find_bank(segment.layer)->expert_bytes() * segment.count();
    }

    // One probe in the last expert of every lease.
    net::HttpResponse prove(const Json& body) {
        if (body.contains("leases")) {
            probed_ = body["leases"];
            Json probes = Json::array();
            for (const Json& id : probed_) {
                const auto lease = std::ranges::find(state_.leases, id.get<uint64_t>(), &Lease::id);
                if (lease == state_.leases.end()) return refuse(Errc::kNotHeld, "no such lease");
                probes.push_back({{"lease", id},
                                  {"expert", lease->segment.end - 1},
                                  {"tensor", 1},
                                  {"offset", 40},
                                  {"bytes", 100}});
            }
            return json({{"nonce", "beef"}, {"probes", probes}});
        }
        if (body["answers"].size() != probed_.size()) return refuse(Errc::kMismatch, "too few");
        for (size_t i = 0; i < probed_.size(); ++i) {
            const auto lease =
                std::ranges::find(state_.leases, probed_[i].get<uint64_t>(), &Lease::id);
            const auto& tensor = state_.toy->model.find_bank(lease->segment.layer)->tensors[1];
            std::vector<uint8_t> want = {0xbe, 0xef};
            const auto from = state_.toy->shards[tensor.shard].begin() +
                              static_cast<long>(tensor.offset +
                                                (lease->segment.end - 1) * tensor.slab_bytes + 40);
            want.insert(want.end(), from, from + 100);
            if (body["answers"][i] != to_hex(crypto::sha256(want)))
                return refuse(Errc::kMismatch, "the bytes differ");
        }
        return json(news(probed_));
    }

    net::HttpResponse data(const net::HttpRequest& request, uint32_t shard) {
        const auto& file = state_.toy->shards.at(shard);
        const auto range = net::parse_range(request.headers.at("range"), file.size());
        KVASIR_CHECK(range && *range);
        const auto [offset, size] = **range;
        if (!is_leased(shard, offset, size)) {
            ++state_.ranges_outside;
            return refuse(Errc::kDenied, "outside your leases");
        }
        net::HttpResponse response;
        response.status = 206;
        response.content_type = "application/octet-stream";
        response.body.assign(file.begin() + static_cast<long>(offset),
                             file.begin() + static_cast<long>(offset + size));
        if (state_.spoils_bytes) response.body[size / 2] ^= 1;
        response.headers.emplace_back("Content-Range", "bytes " + std::to_string(offset) + "-" +
                                                           std::to_string(offset + size - 1) + "/" +
                                                           std::to_string(file.size()));
        state_.bytes_served += size;
        ++state_.ranges_served;
        return response;
    }

    bool is_leased(uint32_t shard, uint64_t offset, uint64_t size) const {
        for (const Lease& lease : state_.leases) {
            for (const auto& tensor : state_.toy->model.find_bank(lease.segment.layer)->tensors) {
                const uint64_t begin = tensor.offset + lease.segment.begin * tensor.slab_bytes;
                const uint64_t end = tensor.offset + lease.segment.end * tensor.slab_bytes;
                if (tensor.shard == shard && begin <= offset && offset + size <= end) return true;
            }
        }
        return false;
    }

    const ScratchFolder folder_;
    const crypto::KeyPair key_;
    std::shared_ptr<const net::TlsServer> tls_;
    uint16_t port_ = 0;
    std::mutex mu_;
    std::condition_variable changed_;
    State state_;  // Guarded by mu_
    std::string token_;
    uint64_t serial_ = 0;
    Json probed_;
    std::unique_ptr<net::Listener> listener_;
};

}  // namespace kvasir::worker::testing
