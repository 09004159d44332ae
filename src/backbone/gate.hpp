// The gate: who may attach to a hub that asks for tokens.
//
// Used by the hub; implemented where keys and the market are known. Thread: the hub's.
// Limits: it must not block for long.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/result.hpp"
#include "wire/attach.hpp"

namespace kvasir::backbone {

struct Admission {
    std::string name;     // of the token, for people; untrusted text
    uint64_t serial = 0;  // of the token: what is revoked
    std::chrono::milliseconds token_left{0};
};

// Token and signature of an ATTACH, or of a RENEW: then `nonce` is null and only the token counts.
// Errors: kDenied, kExpired, kRevoked, kMismatch.
using Gate = std::function<Result<Admission>(const wire::Nonce* nonce, wire::Role role,
                                             const wire::Attach& attach)>;

}  // namespace kvasir::backbone
