// What a market keeps: nodes, invites, tokens, leases. The interface between rules and database.
//
// Used by the coordinator; implemented by src/store. Every call is one transaction: when it
// returns without an error it is on the disk, when it fails nothing of it happened. Nodes are named
// by the 64 hex digits of their public key. Times are seconds since 1970 (invites and tokens live
// across restarts); leases have none, because their time is monotonic: after a restart each has one
// more lease time.
// Thread: any; calls wait for their turn. Limits: StorageLimits of the implementation.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "market/coverage.hpp"

namespace kvasir::market {

struct NodeRow {
    std::string node;
    std::string name;   // untrusted text
    uint8_t roles = 0;  // crypto::RoleBits
    int64_t registered = 0;
    bool is_revoked = false;
    uint64_t bytes_served = 0;
};
struct TokenRow {
    uint64_t serial = 0;
    std::string node;
    int64_t expires = 0;
    bool is_revoked = false;
};
struct LeaseRow {
    uint64_t id = 0;
    std::string node;
    Segment segment;
    uint64_t bytes = 0;
    LeaseState state = LeaseState::kLoading;
};
struct LeaseDelta {
    std::vector<LeaseRow> upserts;
    std::vector<uint64_t> erased;
};
struct BytesServed {
    std::string node;
    uint64_t bytes = 0;  // to be added
};

struct StoredState {
    std::vector<NodeRow> nodes;
    std::vector<TokenRow> tokens_revoked;  // of the last week
    std::vector<LeaseRow> leases;          // of this model
    uint64_t lease_id_next = 1;
};

struct Registration {
    std::string node;
    std::string name;
    Sha256 invite = {};  // SHA-256 of the invite's secret
    int64_t now = 0;
    int64_t token_expires = 0;
    uint8_t role_wanted = 0;  // crypto::RoleBits; 0: whatever the invite gives
};
// The token that a node gets. Who asks again soon (within a twentieth of its life) gets the same
// one, so that asking on and on fills no disk and no list of revocations.
struct TokenMade {
    uint64_t serial = 0;
    int64_t expires = 0;
};
struct Registered {
    TokenMade token;
    uint8_t roles = 0;  // of the node
    bool is_new = false;
};
struct InviteRow {
    Sha256 secret_sha256 = {};  // the secret itself is never stored
    uint32_t uses = 1;
    int64_t expires = 0;
    uint8_t roles = 0;  // what it makes of a node
};

class Storage {
public:
    virtual ~Storage() = default;

    // Everything a market starts from. Leases of other models, and what expired long before `now`,
    // are deleted; from then on leases are of this model.
    virtual Result<StoredState> load(const Sha256& model_id, int64_t now) = 0;
    // Keeps the market's public key (64 hex digits). True if there are nodes or invites, made under
    // another one.
    virtual Result<bool> set_market_key(const std::string& key) = 0;
    virtual Status add_invite(const InviteRow& invite) = 0;
    // A node that is there gets a token, whatever its invite; a new one, or one to which the
    // invite gives a further role, uses it once. An invite that does not give the role wanted is
    // never used: with it a node gets a token if it has the role already, else kDenied.
    // Errors: kRevoked (the node), kDenied (no such invite, it is over or used up, or of another
    // role: says which).
    virtual Result<Registered> register_node(const Registration& registration) = 0;
    // Errors: kNotFound (no such node), kRevoked.
    virtual Result<TokenMade> add_token(const std::string& node, int64_t now, int64_t expires) = 0;
    // The node and all its tokens; its leases are deleted. Returns its tokens, those revoked before
    // included. Errors: kNotFound.
    virtual Result<std::vector<TokenRow>> revoke_node(const std::string& node) = 0;
    virtual Status write_leases(const LeaseDelta& delta) = 0;
    virtual Status add_bytes_served(const std::vector<BytesServed>& served) = 0;
};

}  // namespace kvasir::market
