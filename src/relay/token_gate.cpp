#include "relay/token_gate.hpp"

#include <string>
#include <utility>

namespace kvasir::relay {
namespace {

constexpr milliseconds kForever = std::chrono::hours(24 * 365 * 10);

uint8_t role_bit(wire::Role role) {
    if (role == wire::Role::kObserver) return crypto::kRoleObserver;
    return role == wire::Role::kBackbone ? crypto::kRoleBackbone : crypto::kRoleWorker;
}

}  // namespace

TokenGate::TokenGate(GateOptions options) : options_(std::move(options)) {}

Result<Admission> TokenGate::admit(const wire::Nonce& nonce, wire::Role role,
                                   const wire::Attach& attach) {
    const crypto::PublicKey node{attach.node};
    auto admission = check_token(node, role, attach.token);
    if (!admission) return admission;
    const auto statement = wire::attach_statement(nonce, role, attach);
    if (!crypto::verify(node, wire::kAttachContext, statement, attach.signature)) {
        return fail(Errc::kDenied,
                    "the signature is not by the node's key over this connection's nonce");
    }
    return admission;
}

Result<Admission> TokenGate::renew(const wire::NodeKey& node, wire::Role role,
                                   const std::string& token) {
    return check_token(crypto::PublicKey{node}, role, token);
}

Result<Admission> TokenGate::check_token(const crypto::PublicKey& node, wire::Role role,
                                         const std::string& token) const {
    if (!options_.market) return Admission{{}, 0, kForever};
    if (token.empty()) {
        return fail(Errc::kDenied, "no token: ask the market for one (kvasir worker --invite)");
    }
    const auto claims = crypto::open_token(token, *options_.market);
    if (!claims) return tl::unexpected(claims.error());
    if (claims->node != node) return fail(Errc::kDenied, "the token is another node's");
    const auto now = options_.wall_now
                         ? options_.wall_now()
                         : std::chrono::floor<seconds>(std::chrono::system_clock::now());
    if (const Status time = crypto::check_time(*claims, now, options_.leeway); !time) {
        return tl::unexpected(time.error());
    }
    if ((claims->roles & role_bit(role)) == 0) {
        return fail(Errc::kDenied, "the token does not allow this role");
    }
    if (options_.is_revoked && options_.is_revoked(claims->serial, node)) {
        return fail(Errc::kRevoked, "the token was taken back");
    }
    // A date far away must not overflow; the relay will have been restarted by then.
    const seconds left = claims->expires > now + kForever
                             ? std::chrono::duration_cast<seconds>(kForever)
                             : claims->expires - now;
    return Admission{claims->model_id, claims->serial, left};
}

}  // namespace kvasir::relay
