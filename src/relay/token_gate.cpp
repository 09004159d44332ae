#include "relay/token_gate.hpp"

#include <string>
#include <utility>

#include "access/access.hpp"

namespace kvasir::relay {
namespace {

constexpr milliseconds kForever = std::chrono::hours(24 * 365 * 10);

}  // namespace

TokenGate::TokenGate(GateOptions options) : options_(std::move(options)) {}

Result<Admission> TokenGate::admit(const wire::Nonce& nonce, wire::Role role,
                                   const wire::Attach& attach) {
    if (options_.market) return check(attach, role, &nonce);
    if (Status ok = access::check_signature(attach, role, nonce); !ok)
        return tl::unexpected(ok.error());
    return Admission{{}, 0, kForever};
}

Result<Admission> TokenGate::renew(const wire::NodeKey& node, wire::Role role,
                                   const std::string& token) {
    if (!options_.market) return Admission{{}, 0, kForever};
    wire::Attach attach;
    attach.node = node;
    attach.token = token;
    return check(attach, role, nullptr);
}

Result<Admission> TokenGate::check(const wire::Attach& attach, wire::Role role,
                                   const wire::Nonce* nonce) const {
    const auto now = options_.wall_now
                         ? options_.wall_now()
                         : std::chrono::floor<seconds>(std::chrono::system_clock::now());
    const auto claims = access::check(attach, role, nonce, *options_.market, now, options_.leeway);
    if (!claims) return tl::unexpected(claims.error());
    if (options_.is_revoked && options_.is_revoked(claims->serial, claims->node)) {
        return fail(Errc::kRevoked, "the token was taken back");
    }
    // A date far away must not overflow; the relay will have been restarted by then.
    const seconds left = claims->expires > now + kForever
                             ? std::chrono::duration_cast<seconds>(kForever)
                             : claims->expires - now;
    return Admission{claims->model_id, claims->serial, left};
}

}  // namespace kvasir::relay
