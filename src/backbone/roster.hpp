// The roster: who holds which expert, of the workers that passed their checks.
//
// Used by lanes (read, every layer), the verifier (adds) and the hub (removes). Readers take an immutable
// snapshot; a version number tells them cheaply whether theirs is still the newest.
// Thread: RosterBoard from any thread. Owns: sessions by shared pointer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
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
    uint64_t experts_covered = 0;  // held by at least one usable worker
};

class RosterBoard {
public:
    explicit RosterBoard(std::map<LayerKey, uint32_t> experts_per_layer);

    uint64_t version() const { return version_.load(std::memory_order_acquire); }
    std::shared_ptr<const Roster> snapshot() const;

    // The session's bank passed its checks.
    void add(std::shared_ptr<WorkerSession> session, LayerKey layer);
    void remove(uint64_t tag);
    uint64_t experts_total() const { return experts_total_; }
    // Waits until `covered` experts have a holder; false on the deadline.
    bool wait_covered(uint64_t covered, net::Deadline deadline) const;
    // The first segments without a holder, in words.
    std::string missing(size_t segments_max) const;

private:
    void rebuild_locked();

    // Constant after construction.
    const std::map<LayerKey, uint32_t> experts_per_layer_;
    uint64_t experts_total_ = 0;

    std::atomic<uint64_t> version_{1};
    mutable std::mutex mu_;
    mutable std::condition_variable changed_;
    // Guarded by mu_.
    std::map<uint64_t, std::pair<std::shared_ptr<WorkerSession>, std::vector<LayerKey>>> verified_;
    std::shared_ptr<const Roster> current_;
};

}  // namespace kvasir::backbone
