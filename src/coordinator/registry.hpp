// Who may do what: nodes, their tokens, invites, and what was revoked.
//
// Used by the coordinator and, through Market, by a relay in the same process (open_token() for
// every ATTACH). Storage is asked for what changes; what is asked often is kept in memory.
// Dates are the wall clock's; a clock that jumps can at most make tokens expire, which renew()
// mends, since a node's key never expires.
// Thread: any. Owns: copies of the node rows. Limits: names have crypto::kNameBytesMax bytes.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "coordinator/clocks.hpp"
#include "crypto/keys.hpp"
#include "crypto/token.hpp"
#include "market/storage.hpp"

namespace kvasir::coordinator {

struct Grant {
    crypto::PublicKey node;
    std::string token;
    std::chrono::seconds expires_in{0};
    std::chrono::seconds renew_in{0};
};

struct NodeCounters {
    std::atomic<uint64_t> bytes_served{0};   // in all
    std::atomic<uint64_t> bytes_unsaved{0};  // of them, not yet in storage
};

struct NodeView {
    crypto::PublicKey node;
    market::NodeRow row;
    std::optional<TimePoint> seen;  // in this run
    uint32_t threads = 0;           // as it says
};

class Registry {
public:
    Registry(market::Storage& storage, const crypto::KeyPair& key, const Sha256& model_id,
             std::chrono::seconds token_life, Clocks clocks);
    // Errors: kBadInput (a node in storage is no key).
    Status restore(const market::StoredState& state);

    // The caller has checked the node's signature. Errors: those of Storage::register_node().
    // `role_wanted`: of crypto::RoleBits; 0: whatever the invite gives.
    Result<Grant> enroll(const crypto::PublicKey& node, const std::string& name,
                         std::span<const uint8_t> invite_secret, uint8_t role_wanted);
    // A token with a whole life, or nearly (see market::TokenMade). Errors: kNotFound, kRevoked.
    Result<Grant> renew(const crypto::PublicKey& node);
    // Errors: kDenied (no or another market's token, unknown node), kExpired, kRevoked, kMismatch.
    Result<crypto::TokenClaims> open_token(std::string_view text) const;
    bool is_revoked(uint64_t serial) const;
    // The tokens for which is_revoked() holds, as text signed by the market
    // (crypto/revocations.hpp); made anew at most once a second. Those that expired more than an
    // hour ago are left out.
    std::string revocations();
    // Returns the serials of its tokens that have not expired long ago. Errors: kNotFound.
    Result<std::vector<uint64_t>> revoke(const crypto::PublicKey& node);
    Result<crypto::Invite> make_invite(uint32_t uses, std::chrono::seconds valid_for,
                                       uint8_t roles);

    void saw(const crypto::PublicKey& node, std::optional<uint32_t> threads = std::nullopt);
    std::shared_ptr<NodeCounters> counters(const crypto::PublicKey& node) const;
    std::vector<NodeView> nodes() const;
    // Writes what was served since the last call.
    Status save_bytes_served();

private:
    struct Node {
        market::NodeRow row;
        std::shared_ptr<NodeCounters> counters = std::make_shared<NodeCounters>();
        std::optional<TimePoint> seen;
        uint32_t threads = 0;
    };
    Grant issue(const crypto::PublicKey& node, const market::NodeRow& row,
                const market::TokenMade& token) const;

    // Constant after construction.
    market::Storage& storage_;
    const crypto::KeyPair& key_;
    const Sha256 model_id_;
    const std::chrono::seconds token_life_;
    const Clocks clocks_;
    // Guarded by mu_.
    mutable std::mutex mu_;
    std::map<crypto::PublicKey, Node> nodes_;
    std::map<uint64_t, int64_t> revoked_;  // serial to expiry
    std::string revocations_;              // signed at revocations_made_
    std::optional<TimePoint> revocations_made_;
};

}  // namespace kvasir::coordinator
