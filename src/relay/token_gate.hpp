// TokenGate: who may attach, by Ed25519 signatures and a market's tokens.
//
// Used by Relay; Switchboard sees only its interface, Gate. A node signs its own connection's nonce
// with the key that its token names. In open mode (no market key) any key is its own identity and
// tokens are ignored. Thread: the relay's; `is_revoked` is called there too. Owns: nothing.
#pragma once

#include <functional>
#include <optional>

#include "crypto/token.hpp"
#include "relay/switchboard.hpp"

namespace kvasir::relay {

struct GateOptions {
    std::optional<crypto::PublicKey> market;  // nullopt: open mode
    std::function<bool(uint64_t serial, const crypto::PublicKey& node)> is_revoked;  // may be empty
    std::function<crypto::WallTime()> wall_now;  // empty: the system's clock
    seconds leeway = crypto::kClockLeeway;       // for a token issued in the future
};

class TokenGate final : public Gate {
public:
    explicit TokenGate(GateOptions options);
    Result<Admission> admit(const wire::Nonce& nonce, wire::Role role,
                            const wire::Attach& attach) override;
    Result<Admission> renew(const wire::NodeKey& node, wire::Role role,
                            const std::string& token) override;

private:
    Result<Admission> check(const wire::Attach& attach, wire::Role role,
                            const wire::Nonce* nonce) const;

    const GateOptions options_;
};

}  // namespace kvasir::relay
