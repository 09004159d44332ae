#include "coordinator/service.hpp"

#include <algorithm>
#include <utility>

#include "base/encoding.hpp"
#include "base/log.hpp"
#include "crypto/hash.hpp"
#include "crypto/mac.hpp"

namespace kvasir::coordinator {
namespace {

std::span<const uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

uint64_t random_seed() {
    uint64_t seed = 0;
    crypto::fill_random({reinterpret_cast<uint8_t*>(&seed), sizeof seed});
    return seed;
}

net::HttpResponse not_allowed() {
    net::HttpResponse response = net::error_response(
        {Errc::kUsage, "this path has no such method; docs/market-api.md lists them"});
    response.status = 405;
    return response;
}

market::LeaseRow row_of(const market::Lease& lease) {
    return {lease.id, crypto::to_hex(lease.node), lease.segment, lease.bytes, lease.state};
}

// Banks that are not leased here are passed over: a cache may have some of them.
Status check_segments(const market::Catalogue& catalogue, const char* name,
                      const std::vector<Segment>& segments) {
    for (size_t i = 0; i < segments.size(); ++i) {
        const auto bank = catalogue.find(segments[i].layer);
        if (!bank || segments[i].end <= catalogue.banks()[*bank].experts) continue;
        return fail(Errc::kBadInput,
                    "field \"" + std::string(name) + "[" + std::to_string(i) + "].end\" is " +
                        std::to_string(segments[i].end) + ": the layer has " +
                        std::to_string(catalogue.banks()[*bank].experts) + " experts");
    }
    return {};
}

}  // namespace

net::HttpResponse json_response(std::string body) {
    net::HttpResponse response;
    response.body = std::move(body);
    response.headers = {{"X-Content-Type-Options", "nosniff"}, {"Cache-Control", "no-store"}};
    return response;
}

Service::Service(ServiceConfig config, Parts parts)
    : config_(std::move(config)),
      parts_(std::move(parts)),
      book_(market::Catalogue::from(parts_.files.model()), config_.rules),
      random_(random_seed()),
      bytes_saved_(now()) {
    const moe::Model& model = parts_.files.model();
    const std::string id = to_hex(parts_.files.model_id());
    MarketFacts facts;
    facts.name = config_.name;
    facts.market_key = parts_.key.public_key();
    facts.model_id = parts_.files.model_id();
    facts.model_name = model.name;
    facts.arch = model.arch;
    facts.bytes = model.bytes_total();
    facts.experts = model.experts_total();
    facts.bytes_experts = model.bytes_experts();
    facts.relay_url = config_.relay_url;
    facts.outline_bytes = parts_.files.outline_bytes().size();
    facts.outline_sha256 = crypto::sha256(parts_.files.outline_bytes());
    facts.has_origin = !config_.origin.empty();
    market_text_ = encode_market(facts);
    outline_path_ = "/api/v1/models/" + id + "/outline";
    outline_signature_ = encode_hex(parts_.key.sign("outline", parts_.files.outline_bytes()));
    data_prefix_ = "/models/" + id + "/data/";
}

void Service::restore(const market::StoredState& state) {
    std::vector<market::Lease> leases;
    for (const market::LeaseRow& row : state.leases) {
        const auto node = crypto::parse_public_key(row.node);
        if (!node) continue;  // Registry::restore() has refused such a database
        market::Lease lease;
        lease.id = row.id;
        lease.node = *node;
        lease.segment = row.segment;
        lease.state = row.state;
        leases.push_back(lease);
    }
    book_.restore(leases, state.lease_id_next, now());
}

std::optional<net::HttpResponse> Service::answer_at_once(const net::HttpRequest& request) const {
    const bool is_get = request.method == "GET";
    if (request.path == "/api/v1/market") {
        return is_get ? json_response(market_text_) : not_allowed();
    }
    if (request.path == outline_path_) {
        if (!is_get) return not_allowed();
        net::HttpResponse response;
        response.content_type = "application/octet-stream";
        response.file = parts_.files.outline();
        response.headers = {{"Kvasir-Signature", outline_signature_}};
        return response;
    }
    if (request.path == "/api/v1/challenge") {
        if (request.method != "POST") return not_allowed();
        return json_response(encode_challenge(challenges_.make(now())));
    }
    // What a stranger sends is read on the market's only thread.
    const bool is_strangers = request.path.starts_with("/api/v1/nodes");
    const size_t body_bytes_max =
        is_strangers ? config_.limits.stranger_body_bytes_max : config_.limits.body_bytes_max;
    if (request.body.size() > body_bytes_max) {
        return net::error_response(
            {Errc::kLimit, "the body has more than " + std::to_string(body_bytes_max) + " bytes"});
    }
    return std::nullopt;
}

const std::vector<Service::Route>& Service::routes() {
    using For = Route::For;
    static const std::vector<Route> kRoutes = {
        {"POST", "/api/v1/nodes", &Service::enroll, For::kAll},
        {"GET", "/api/v1/nodes", &Service::show_nodes, For::kOperator},
        {"POST", "/api/v1/nodes/renew", &Service::renew, For::kAll},
        {"POST", "/api/v1/leases", &Service::ask, For::kNodes},
        {"DELETE", "/api/v1/leases", &Service::release, For::kNodes},
        {"POST", "/api/v1/leases/progress", &Service::progress, For::kNodes},
        {"POST", "/api/v1/heartbeat", &Service::heartbeat, For::kNodes},
        {"GET", "/api/v1/coverage", &Service::show_coverage, For::kAll},
        {"GET", "/api/v1/revocations", &Service::show_revocations, For::kAll},
        {"POST", "/api/v1/admin/invites", &Service::add_invite, For::kOperator},
        {"POST", "/api/v1/admin/revoke", &Service::revoke_node, For::kOperator},
    };
    return kRoutes;
}

void Service::answer(const net::HttpRequest& request, const net::Respond& respond) {
    book_.expire(now());
    std::erase_if(proofs_, [&](const auto& one) { return one.second.expires <= now(); });
    if (auto response = answer_route(request, respond)) respond(std::move(*response));
    if (now() - bytes_saved_ >= config_.limits.bytes_saved_every) (void)save();
}

// nullopt: the answer comes (or came) through `respond`.
std::optional<net::HttpResponse> Service::answer_route(const net::HttpRequest& request,
                                                       const net::Respond& respond) {
    const auto answer_of = [](Answer answer) {
        return answer ? std::move(*answer) : net::error_response(answer.error());
    };
    const bool is_data = request.path.starts_with(data_prefix_);
    if (is_data || request.path == "/api/v1/leases/prove") {
        if (request.method != (is_data ? "GET" : "POST")) return not_allowed();
        const auto claims = authenticate(request);
        if (!claims) return net::error_response(claims.error());
        if (is_data) return answer_of(data(request, claims->node));
        prove(request, claims->node, respond);
        return std::nullopt;
    }
    bool is_known = false;
    for (const Route& route : routes()) {
        if (request.path != route.path) continue;
        is_known = true;
        if (request.method != route.method) continue;
        crypto::PublicKey node;
        if (route.who == Route::For::kNodes) {
            const auto claims = authenticate(request);
            if (!claims) return net::error_response(claims.error());
            node = claims->node;
        }
        if (route.who == Route::For::kOperator) {
            if (Status ok = check_operator(request); !ok) return net::error_response(ok.error());
        }
        return answer_of((this->*route.call)(request, node));
    }
    if (is_known) return not_allowed();
    return net::error_response({Errc::kNotFound, "there is nothing at " + printable(request.path)});
}

Result<crypto::TokenClaims> Service::authenticate(const net::HttpRequest& request) {
    auto claims = parts_.registry.open_token(request.bearer());
    if (!claims) return claims;
    if ((claims->roles & crypto::kRoleWorker) == 0) {
        return fail(Errc::kDenied,
                    "this node is no worker, and leases and their bytes are for workers: register "
                    "with a worker's invite");
    }
    parts_.registry.saw(claims->node);
    return claims;
}

Status Service::check_operator(const net::HttpRequest& request) const {
    const Sha256 given = crypto::sha256(bytes_of(request.bearer()));
    const Sha256 ours = crypto::sha256(bytes_of(config_.operator_secret));
    if (crypto::equal_constant_time(given, ours)) return {};
    return fail(Errc::kDenied, "this needs the operator's secret: Authorization: Bearer SECRET");
}

// ---- nodes ----

Service::Answer Service::enroll(const net::HttpRequest& request, const crypto::PublicKey&) {
    const auto body = decode_enroll(request.body);
    if (!body) return tl::unexpected(body.error());
    if (Status ok = challenges_.check(body->challenge, now()); !ok) {
        return tl::unexpected(ok.error());
    }
    if (body->invite.market != parts_.key.public_key()) {
        return fail(Errc::kDenied, "the invite code is for another market");
    }
    std::vector<uint8_t> statement = body->challenge;
    statement.insert(statement.end(), body->invite.secret.begin(), body->invite.secret.end());
    if (!crypto::verify(body->key, "register", statement, body->signature)) {
        return fail(Errc::kDenied, "field \"signature\" is not by that public key");
    }
    const auto grant =
        parts_.registry.enroll(body->key, body->name, body->invite.secret, body->role_wanted);
    if (!grant) return tl::unexpected(grant.error());
    return json_response(encode_grant(*grant));
}

Service::Answer Service::renew(const net::HttpRequest& request, const crypto::PublicKey&) {
    const auto body = decode_renew(request.body);
    if (!body) return tl::unexpected(body.error());
    if (Status ok = challenges_.check(body->challenge, now()); !ok) {
        return tl::unexpected(ok.error());
    }
    if (!crypto::verify(body->key, "renew", body->challenge, body->signature)) {
        return fail(Errc::kDenied, "field \"signature\" is not by that public key");
    }
    const auto grant = parts_.registry.renew(body->key);
    if (!grant) return tl::unexpected(grant.error());
    return json_response(encode_grant(*grant));
}

Service::Answer Service::show_nodes(const net::HttpRequest&, const crypto::PublicKey&) {
    std::vector<NodeReport> reports;
    for (NodeView& node : parts_.registry.nodes()) {
        NodeReport report;
        for (const market::Lease& lease : book_.leases_of(node.node, now())) {
            const bool is_serving = lease.state == market::LeaseState::kServing;
            ++(is_serving ? report.leases_serving : report.leases_loading);
            report.bytes_leased += lease.bytes;
        }
        report.node = std::move(node);
        reports.push_back(std::move(report));
    }
    return json_response(encode_nodes(reports, now()));
}

// ---- leases ----

Service::Answer Service::ask(const net::HttpRequest& request, const crypto::PublicKey& node) {
    const auto body = decode_ask(request.body);
    if (!body) return tl::unexpected(body.error());
    if (Status ok = check_segments(book_.catalogue(), "have", body->have); !ok)
        return tl::unexpected(ok.error());
    if (Status ok = check_segments(book_.catalogue(), "begun", body->begun); !ok)
        return tl::unexpected(ok.error());
    parts_.registry.saw(node, body->threads);
    const uint64_t least = book_.catalogue().expert_bytes_min();
    if (body->budget_bytes < least) {
        return fail(Errc::kUsage, "field \"budget_bytes\" is " +
                                      std::to_string(body->budget_bytes) +
                                      ": the smallest expert has " + std::to_string(least));
    }
    const auto leases =
        book_.offer({node, body->budget_bytes, body->have, random_(), body->begun}, now());
    if (Status ok = save_leases(); !ok) return tl::unexpected(ok.error());
    return json_response(encode_leases(leases, now(), heartbeat_every()));
}

Service::Answer Service::progress(const net::HttpRequest& request, const crypto::PublicKey& node) {
    const auto body = decode_progress(request.body);
    if (!body) return tl::unexpected(body.error());
    return json_response(encode_renewal(book_.progress(node, *body, now()), now()));
}

Service::Answer Service::heartbeat(const net::HttpRequest& request, const crypto::PublicKey& node) {
    const auto body = decode_heartbeat(request.body);
    if (!body) return tl::unexpected(body.error());
    BeatReply reply;
    reply.renewal = book_.heartbeat(node, *body, now());
    reply.has_gap = book_.has_gap_for(node, now());
    const auto claims = parts_.registry.open_token(request.bearer());
    if (claims) {
        const auto life = claims->expires - claims->issued;
        if ((claims->expires - config_.clocks.wall()) * 3 < life) {
            if (auto grant = parts_.registry.renew(node)) reply.grant = std::move(*grant);
        }
    }
    return json_response(encode_heartbeat(reply, now()));
}

Service::Answer Service::release(const net::HttpRequest& request, const crypto::PublicKey& node) {
    const auto body = decode_release(request.body);
    if (!body) return tl::unexpected(body.error());
    const size_t count =
        *body ? book_.release(node, **body, now()) : book_.release_all(node, now());
    if (Status ok = save_leases(); !ok) return tl::unexpected(ok.error());
    return json_response(encode_released(count));
}

Service::Answer Service::show_coverage(const net::HttpRequest&, const crypto::PublicKey&) {
    return json_response(encode_coverage(coverage(), parts_.files.model_id()));
}

Service::Answer Service::show_revocations(const net::HttpRequest&, const crypto::PublicKey&) {
    net::HttpResponse response;
    response.content_type = "text/plain";
    response.body = parts_.registry.revocations();
    return response;
}

market::CoverageMap Service::coverage() {
    return book_.coverage(now());
}

// ---- the operator ----

Service::Answer Service::add_invite(const net::HttpRequest& request, const crypto::PublicKey&) {
    const auto body = decode_invite(request.body);
    if (!body) return tl::unexpected(body.error());
    const auto invite = make_invite(*body);
    if (!invite) return tl::unexpected(invite.error());
    return json_response(encode_invite(*invite, *body));
}

Service::Answer Service::revoke_node(const net::HttpRequest& request, const crypto::PublicKey&) {
    const auto node = decode_revoke(request.body);
    if (!node) return tl::unexpected(node.error());
    const auto serials = revoke(*node);
    if (!serials) return tl::unexpected(serials.error());
    return json_response(encode_revoked(*node, serials->size()));
}

Result<crypto::Invite> Service::make_invite(const InviteBody& terms) {
    auto invite = parts_.registry.make_invite(terms.uses, terms.valid_for, terms.roles);
    if (invite) invite->tls_pin = config_.tls_pin;
    return invite;
}

Result<std::vector<uint64_t>> Service::revoke(const crypto::PublicKey& node) {
    auto serials = parts_.registry.revoke(node);
    if (!serials) return serials;
    book_.release_all(node, now());
    proofs_.erase(node);
    (void)save_leases();  // storage has deleted them already; others' changes stay unsaved
    log(LogLevel::kInfo, "market", "node " + crypto::to_hex(node).substr(0, 16) + " was revoked");
    parts_.on_revoked(node, *serials);
    return serials;
}

// ---- storage ----

// What could not be written stays for the next time: memory rules, storage follows.
Status Service::save_leases() {
    for (auto& [id, lease] : book_.take_changes()) unsaved_[id] = std::move(lease);
    if (unsaved_.empty()) return {};
    market::LeaseDelta delta;
    for (const auto& [id, lease] : unsaved_) {
        if (lease) delta.upserts.push_back(row_of(*lease));
        if (!lease) delta.erased.push_back(id);
    }
    Status ok = parts_.storage.write_leases(delta);
    if (ok) unsaved_.clear();
    if (!ok) log(LogLevel::kWarn, "market", "leases are not saved: " + ok.error().detail);
    return ok;
}

Status Service::save() {
    bytes_saved_ = now();
    Status bytes = parts_.registry.save_bytes_served();
    Status leases = save_leases();
    return leases ? bytes : leases;
}

std::chrono::seconds Service::heartbeat_every() const {
    const auto third = std::chrono::floor<std::chrono::seconds>(config_.rules.serving / 3);
    return std::max(third, std::chrono::seconds(1));
}

}  // namespace kvasir::coordinator
