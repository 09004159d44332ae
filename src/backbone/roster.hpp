// The roster: who holds which expert, of the workers that passed their checks.
//
// Used by lanes (read, every layer), the verifier (adds) and the hub (removes). Readers take an
// immutable snapshot; a version number tells them cheaply whether theirs is still the newest.
//
// Thread: RosterBoard from any thread. Owns: sessions by shared pointer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "backbone/session.hpp"

namespace kvasir::backbone {

struct LayerRoster {
    // By global expert id: indices into Roster::workers.
    std::vector<std::vector<uint32_t>> holders;
};

struct Roster {
    std::vector<std::shared_ptr<WorkerSession>> workers;
    std::map<LayerKey, LayerRoster> layers;
};

class RosterBoard {
public:
    explicit RosterBoard(std::map<LayerKey, uint32_t> experts_per_layer);

    uint64_t version() const { return version_.load(std::memory_order_acquire); }
    std::shared_ptr<const Roster> snapshot() const;

    // The session's bank passed its checks. A session that has closed meanwhile is not added.
    void add(std::shared_ptr<WorkerSession> session, LayerKey layer);
    void remove(uint64_t tag);
    // The layer's experts are really used: its program was seen in a graph. Only such layers count
    // for coverage (an MTP layer that no graph runs need not be held, and cannot be verified).
    void activate(LayerKey layer);
    // Experts of active layers, and how many of them have a holder.
    uint64_t experts_active() const;
    uint64_t experts_covered() const;
    // Waits until that share of the active experts has a holder; false on the deadline.
    bool wait_share(double share, net::Deadline deadline) const;
    // The first segments without a holder, in words.
    std::string missing(size_t segments_max) const;

private:
    void rebuild_locked();
    uint64_t active_locked() const;
    uint64_t covered_locked() const;

    // Constant after construction.
    const std::map<LayerKey, uint32_t> experts_per_layer_;

    std::atomic<uint64_t> version_{1};
    mutable std::mutex mu_;
    mutable std::condition_variable changed_;
    // Guarded by mu_.
    std::set<LayerKey> active_;
    std::map<uint64_t, std::pair<std::shared_ptr<WorkerSession>, std::vector<LayerKey>>> verified_;
    std::shared_ptr<const Roster> current_;
};

}  // namespace kvasir::backbone
