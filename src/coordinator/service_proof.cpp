// Proofs: random places of a lease's slabs, compared with the market's own file.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "coordinator/service.hpp"
#include "crypto/hash.hpp"
#include "crypto/mac.hpp"

namespace kvasir::coordinator {
namespace {

Sha256 answer_to(const Nonce& nonce, std::span<const uint8_t> bytes) {
    crypto::Hasher hasher;
    hasher.update(nonce);
    hasher.update(bytes);
    return hasher.finish();
}

std::string list(const std::vector<uint64_t>& ids) {
    std::string out;
    for (size_t i = 0; i < ids.size() && i < 8; ++i) {
        out += (out.empty() ? "" : ", ") + std::to_string(ids[i]);
    }
    if (ids.size() > 8) out += " and " + std::to_string(ids.size() - 8) + " more";
    return out;
}

}  // namespace

Service::Answer Service::ask_probes(const std::vector<uint64_t>& leases,
                                    const crypto::PublicKey& node) {
    Proof proof;
    crypto::fill_random(proof.nonce);
    proof.expires = now() + config_.limits.proof_valid;
    const auto fair = static_cast<uint32_t>(config_.limits.probes_max / leases.size());
    const uint32_t count = std::clamp(fair, 2U, config_.limits.probes_per_lease_max);
    if (leases.size() * count > kAnswersMax) {
        return fail(Errc::kLimit, "too many leases in one proof: name at most " +
                                      std::to_string(kAnswersMax / 2));
    }
    for (const uint64_t id : leases) {
        const auto lease = book_.find(node, id, now());
        if (!lease) return tl::unexpected(lease.error());
        const moe::ExpertBank* bank = parts_.files.model().find_bank(lease->segment.layer);
        for (const market::Probe& probe : market::make_probes(*lease, *bank, count, random_)) {
            proof.probes.push_back(probe);
            proof.layers.push_back(lease->segment.layer);
        }
    }
    std::string text = encode_probes(proof.nonce, proof.probes);
    proofs_[node] = std::move(proof);
    return json_response(std::move(text));
}

void Service::prove(const net::HttpRequest& request, const crypto::PublicKey& node,
                    const net::Respond& respond) {
    const auto body = decode_prove(request.body);
    if (!body) return respond(net::error_response(body.error()));
    if (body->nonce) return check_answers(*body, node, respond);
    auto answer = ask_probes(body->leases, node);
    respond(answer ? std::move(*answer) : net::error_response(answer.error()));
}

void Service::check_answers(const ProveBody& body, const crypto::PublicKey& node,
                            const net::Respond& respond) {
    const auto found = proofs_.find(node);
    if (found == proofs_.end() || found->second.nonce != *body.nonce) {
        return respond(
            net::error_response({Errc::kExpired,
                                 "field \"nonce\" is not (or no longer) one of ours for this node: "
                                 "ask for probes again"}));
    }
    if (body.answers.size() != found->second.probes.size()) {
        return respond(net::error_response(
            {Errc::kBadInput, "field \"answers\" has " + std::to_string(body.answers.size()) +
                                  " entries, there were " +
                                  std::to_string(found->second.probes.size()) + " probes"}));
    }
    // Good for one try, so that nobody can guess on.
    auto proof = std::make_shared<Proof>(std::move(found->second));
    proofs_.erase(found);
    const auto check = [this, proof, node, respond, answers = body.answers] {
        std::map<uint64_t, bool> verdicts;
        for (size_t i = 0; i < proof->probes.size(); ++i) {
            const auto bytes = parts_.files.read(proof->probes[i], proof->layers[i]);
            if (!bytes) return respond(net::error_response(bytes.error()));
            const bool is_right = answer_to(proof->nonce, *bytes) == answers[i];
            const auto [at, is_first] = verdicts.emplace(proof->probes[i].lease, is_right);
            at->second = at->second && is_right;
        }
        const auto finish = [this, node, respond, verdicts] {
            auto answer = judge(node, verdicts);
            respond(answer ? std::move(*answer) : net::error_response(answer.error()));
        };
        if (Status ok = parts_.post(finish); !ok) respond(net::error_response(ok.error()));
    };
    if (Status ok = parts_.disk.post(check); !ok) respond(net::error_response(ok.error()));
}

Service::Answer Service::judge(const crypto::PublicKey& node,
                               const std::map<uint64_t, bool>& verdicts) {
    std::vector<uint64_t> wrong, released;
    market::Renewal proved;
    for (const auto& [id, is_right] : verdicts) {
        if (!is_right) {
            const auto is_over = book_.proof_wrong(node, id, now());
            wrong.push_back(id);
            if (is_over && *is_over) released.push_back(id);
        } else if (!book_.proved(node, id, now())) {
            proved.lost.push_back(id);  // expired, released or revoked meanwhile
        } else {
            proved.leases.push_back(*book_.find(node, id, now()));
        }
    }
    if (Status ok = save_leases(); !ok) return tl::unexpected(ok.error());
    if (wrong.empty()) return json_response(encode_proved(proved, now(), heartbeat_every()));
    const Error error{
        Errc::kDenied,
        "these are not the model's bytes, in lease " + list(wrong) +
            (released.empty() ? ": fetch them again"
                              : "; released after repeated failures: " + list(released))};
    log(LogLevel::kWarn, "market",
        "node " + crypto::to_hex(node).substr(0, 16) + " failed the proof of lease " + list(wrong));
    net::HttpResponse response = json_response(encode_proof_error(error, wrong, released));
    response.status = errc_info(error.code).http_status;
    return response;
}

}  // namespace kvasir::coordinator
