// The rules of leases: who may hold which segment until when, and what that covers. Pure.
//
// Used by the coordinator, which serialises the calls and stores what take_changes() returns. A
// lease begins as a promise (loading): no other node is offered the same gap, but it is no
// coverage. Once the node has proved the bytes it is serving, and every heartbeat renews it. A
// lease that is not renewed ends, whatever its node is; a node that asks again (after a restart)
// keeps its leases and gets what its budget has room for.
// Thread: the owner serialises. Time: `now` goes in, monotonic; nothing is read from a clock, so
// no change of the wall clock ends or prolongs a lease. Owns: leases, coverage. Limits: LeaseRules.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "crypto/keys.hpp"
#include "market/catalogue.hpp"
#include "market/coverage.hpp"

namespace kvasir::market {

using NodeKey = crypto::PublicKey;
using TimePoint = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;

struct LeaseRules {
    uint32_t replicas_target = 2;
    milliseconds serving{60000};                  // from one heartbeat
    uint64_t loading_bytes_per_second = 1000000;  // assumed of a node's line
    milliseconds loading_min{60000};
    // A loading lease lives at most this many times its assumed time, or loading_hold if longer.
    uint32_t loading_patience = 10;
    milliseconds loading_hold{3600000};
    uint32_t leases_per_node_max = 1024;
    uint32_t proofs_wrong_max = 3;
};

struct Lease {
    uint64_t id = 0;  // never used again
    NodeKey node;
    Segment segment;
    uint64_t bytes = 0;
    LeaseState state = LeaseState::kLoading;
    uint64_t bytes_done = 0;  // as the node says
    uint32_t proofs_wrong = 0;
    TimePoint loading_since;
    TimePoint expires;  // dead from then on
};

struct Ask {
    NodeKey node;
    uint64_t budget_bytes = 0;        // for all its leases together
    std::vector<Segment> have;        // what it has in its cache
    uint64_t seed = 0;                // decides between equals
    std::vector<Segment> begun = {};  // of what it has bytes, but not all
};

struct Progress {
    uint64_t id = 0;
    uint64_t bytes_done = 0;
};

// What became of the leases that a node named: renewed (or still loading), or not its any more.
struct Renewal {
    std::vector<Lease> leases;
    std::vector<uint64_t> lost;
};

// What storage must follow: a lease as it is now, or nullopt for one that is gone.
using LeaseChanges = std::map<uint64_t, std::optional<Lease>>;

class LeaseBook {
public:
    LeaseBook(Catalogue catalogue, LeaseRules rules);
    LeaseBook(const LeaseBook&) = delete;
    LeaseBook& operator=(const LeaseBook&) = delete;

    // Leases of an earlier run, each good for one more lease time from `now`. Those that this
    // catalogue does not contain, or whose node would hold an expert twice, become changes (gone).
    // `id_next` is greater than every id ever given.
    void restore(std::span<const Lease> leases, uint64_t id_next, TimePoint now);

    // All leases of the node afterwards: those it had, as far as the budget reaches, and new ones.
    // A serving lease whose segment is not in `have` is loading again: the node has lost it.
    std::vector<Lease> offer(const Ask& ask, TimePoint now);
    // Bytes that have grown since the last report, over the leases named, renew those that load.
    Renewal progress(const NodeKey& node, std::span<const Progress> reports, TimePoint now);
    // Loading becomes serving; renews. Errors: kNotHeld (expired, released, never the node's).
    Status proved(const NodeKey& node, uint64_t id, TimePoint now);
    // True if it was one time too many: the lease is released. Errors: kNotHeld.
    Result<bool> proof_wrong(const NodeKey& node, uint64_t id, TimePoint now);
    // Renews what serves; loading leases are returned as they are.
    Renewal heartbeat(const NodeKey& node, std::span<const uint64_t> ids, TimePoint now);
    // Returns how many there were.
    size_t release(const NodeKey& node, std::span<const uint64_t> ids, TimePoint now);
    size_t release_all(const NodeKey& node, TimePoint now);
    void expire(TimePoint now);

    std::vector<Lease> leases_of(const NodeKey& node, TimePoint now);
    // Errors: kNotHeld.
    Result<Lease> find(const NodeKey& node, uint64_t id, TimePoint now);
    CoverageMap coverage(TimePoint now);
    // Would this node, asking again, be offered an expert that nobody serves or promises?
    bool has_gap_for(const NodeKey& node, TimePoint now);
    size_t leases_total() const { return leases_.size(); }
    const Catalogue& catalogue() const { return catalogue_; }
    const LeaseRules& rules() const { return rules_; }
    // Changes since the last call.
    LeaseChanges take_changes() { return std::exchange(changes_, {}); }

private:
    struct Holder {
        uint64_t budget_bytes = 0;  // of its last ask in this run
        std::set<uint64_t> ids;
    };
    milliseconds loading_time(uint64_t bytes_missing) const;
    uint64_t bytes_missing(const Holder& holder) const;
    uint64_t bytes_held(const Holder& holder) const;
    Lease* find_live(const NodeKey& node, uint64_t id);
    void insert(Lease lease);
    void erase(uint64_t id);
    void set_state(Lease& lease, LeaseState state);
    void set_expiry(Lease& lease, TimePoint expires);
    void renew_loading(Lease& lease, uint64_t missing, TimePoint now);
    void shrink(const Ask& ask, const Holder& holder);
    std::vector<Segment> segments(const Holder& holder) const;
    std::vector<Lease> copy(const std::set<uint64_t>& ids) const;

    // Constant after construction.
    Catalogue catalogue_;
    LeaseRules rules_;
    // State.
    Coverage coverage_;
    std::map<uint64_t, Lease> leases_;
    std::map<NodeKey, Holder> holders_;
    std::set<std::pair<TimePoint, uint64_t>> expiries_;
    uint64_t id_next_ = 1;
    LeaseChanges changes_;
};

}  // namespace kvasir::market
