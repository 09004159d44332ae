// Bodies of replies: values to JSON.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "base/encoding.hpp"
#include "base/log.hpp"
#include "coordinator/messages.hpp"
#include "market/roles.hpp"
#include "wire/frame.hpp"

namespace kvasir::coordinator {
namespace {

using Json = nlohmann::ordered_json;
using market::Lease;
using market::TimePoint;

constexpr size_t kNameMax = 200;

std::string to_text(const Json& json) {
    const std::string plain = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    std::string out;
    out.reserve(plain.size() + 1);
    // These stand in texts only, so an escape means the same.
    for (const char c : plain) {
        switch (c) {
            case '<':
                out += "\\u003c";
                break;
            case '>':
                out += "\\u003e";
                break;
            case '&':
                out += "\\u0026";
                break;
            default:
                out += c;
        }
    }
    out += '\n';
    return out;
}

int64_t seconds_left(TimePoint until, TimePoint now) {
    return std::max<int64_t>(0, std::chrono::floor<std::chrono::seconds>(until - now).count());
}

const char* state_name(market::LeaseState state) {
    return state == market::LeaseState::kServing ? "serving" : "loading";
}

Json to_json(const Lease& lease, TimePoint now) {
    return {{"id", lease.id},
            {"layer", lease.segment.layer.layer},
            {"bank", lease.segment.layer.bank},
            {"begin", lease.segment.begin},
            {"end", lease.segment.end},
            {"bytes", lease.bytes},
            {"state", state_name(lease.state)},
            {"expires_in_s", seconds_left(lease.expires, now)}};
}

// Of a renewal only what changes.
Json to_json(const market::Renewal& renewal, TimePoint now) {
    Json leases = Json::array();
    for (const Lease& lease : renewal.leases) {
        leases.push_back({{"id", lease.id},
                          {"state", state_name(lease.state)},
                          {"expires_in_s", seconds_left(lease.expires, now)}});
    }
    return {{"leases", leases}, {"lost", renewal.lost}};
}

Json to_json(const Grant& grant) {
    return {{"node", crypto::to_hex(grant.node)},
            {"token", grant.token},
            {"expires_in_s", grant.expires_in.count()},
            {"renew_in_s", grant.renew_in.count()}};
}

}  // namespace

std::string encode_market(const MarketFacts& facts) {
    const std::string base = "/models/" + to_hex(facts.model_id);
    const Json protocol = {{"major", wire::kProtocolMajor}, {"minor", wire::kProtocolMinor}};
    Json out = {{"protocol", protocol},
                {"name", printable(facts.name, kNameMax)},
                {"market_key", crypto::to_hex(facts.market_key)}};
    out["model"] = {{"id", to_hex(facts.model_id)},
                    {"name", printable(facts.model_name, kNameMax)},
                    {"arch", printable(facts.arch, kNameMax)},
                    {"bytes", facts.bytes},
                    {"experts", facts.experts},
                    {"bytes_experts", facts.bytes_experts}};
    if (!facts.relay_url.empty()) out["relay"] = {{"url", facts.relay_url}};
    out["outline"] = {{"path", "/api/v1" + base + "/outline"},
                      {"bytes", facts.outline_bytes},
                      {"sha256", to_hex(facts.outline_sha256)}};
    out["data"] = {{"path", base + "/data/{shard}"}, {"redirects", facts.has_origin}};
    return to_text(out);
}

std::string encode_challenge(const std::vector<uint8_t>& challenge) {
    return to_text({{"challenge", encode_hex(challenge)}});
}

std::string encode_grant(const Grant& grant) {
    return to_text(to_json(grant));
}

std::string encode_leases(const std::vector<Lease>& leases, TimePoint now,
                          std::chrono::seconds heartbeat_every) {
    Json list = Json::array();
    for (const Lease& lease : leases) list.push_back(to_json(lease, now));
    return to_text({{"leases", list}, {"heartbeat_every_s", heartbeat_every.count()}});
}

std::string encode_renewal(const market::Renewal& renewal, TimePoint now) {
    return to_text(to_json(renewal, now));
}

std::string encode_probes(const Nonce& nonce, const std::vector<market::Probe>& probes) {
    Json list = Json::array();
    for (const market::Probe& probe : probes) {
        list.push_back({{"lease", probe.lease},
                        {"expert", probe.expert},
                        {"tensor", probe.tensor},
                        {"offset", probe.offset},
                        {"bytes", probe.bytes}});
    }
    return to_text({{"nonce", encode_hex(nonce)}, {"probes", list}});
}

std::string encode_proved(const market::Renewal& proved, TimePoint now,
                          std::chrono::seconds heartbeat_every) {
    Json out = to_json(proved, now);
    out["heartbeat_every_s"] = heartbeat_every.count();
    return to_text(out);
}

std::string encode_heartbeat(const BeatReply& reply, TimePoint now) {
    Json out = to_json(reply.renewal, now);
    if (reply.grant) out["token"] = to_json(*reply.grant);
    out["ask"] = reply.has_gap;
    return to_text(out);
}

std::string encode_released(size_t count) {
    return to_text({{"released", count}});
}

std::string encode_coverage(const market::CoverageMap& map, const Sha256& model_id) {
    Json banks = Json::array();
    for (const market::BankCoverage& bank : map.banks) {
        Json ranges = Json::array();
        for (const market::CoverageRange& range : bank.ranges) {
            ranges.push_back({{"begin", range.begin},
                              {"end", range.end},
                              {"serving", range.serving},
                              {"loading", range.loading}});
        }
        banks.push_back({{"layer", bank.bank.layer.layer},
                         {"bank", bank.bank.layer.bank},
                         {"experts", bank.bank.experts},
                         {"expert_bytes", bank.bank.expert_bytes},
                         {"ranges", ranges}});
    }
    return to_text({{"model", to_hex(model_id)},
                    {"replicas_target", map.replicas_target},
                    {"experts", map.experts_total},
                    {"experts_serving", map.experts_serving},
                    {"experts_promised", map.experts_promised},
                    {"banks", banks}});
}

std::string encode_nodes(const std::vector<NodeReport>& nodes, TimePoint now) {
    Json list = Json::array();
    for (const NodeReport& report : nodes) {
        const market::NodeRow& row = report.node.row;
        Json one = {{"node", crypto::to_hex(report.node.node)},
                    {"name", printable(row.name, kNameMax)},
                    {"roles", market::role_names(row.roles)},
                    {"registered", row.registered},
                    {"revoked", row.is_revoked},
                    {"threads", report.node.threads},
                    {"leases_loading", report.leases_loading},
                    {"leases_serving", report.leases_serving},
                    {"bytes_leased", report.bytes_leased},
                    {"bytes_served", row.bytes_served}};
        one["seen_s_ago"] = report.node.seen ? Json(seconds_left(now, *report.node.seen)) : Json();
        list.push_back(std::move(one));
    }
    return to_text({{"nodes", list}});
}

std::string encode_invite(const crypto::Invite& invite, const InviteBody& terms) {
    return to_text({{"invite", crypto::to_string(invite)},
                    {"uses", terms.uses},
                    {"expires_in_s", terms.valid_for.count()},
                    {"roles", market::role_names(terms.roles)}});
}

std::string encode_revoked(const crypto::PublicKey& node, size_t tokens) {
    return to_text({{"node", crypto::to_hex(node)}, {"tokens_revoked", tokens}});
}

std::string encode_proof_error(const Error& error, const std::vector<uint64_t>& wrong,
                               const std::vector<uint64_t>& released) {
    const ErrcInfo& info = errc_info(error.code);
    Json inner = {{"code", info.name}, {"message", error.detail}, {"retryable", info.retryable}};
    inner["wrong"] = wrong;
    inner["released"] = released;
    return to_text({{"error", inner}});
}

}  // namespace kvasir::coordinator
