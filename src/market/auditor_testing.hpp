// The auditor: a slower, simpler model of leases that the property tests keep beside LeaseBook.
//
// It knows one list of leases and counts coverage by looking at all of them; it has no index, no
// counters and no placement rule. Used by market's tests only. Thread: one.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "market/leases.hpp"

namespace kvasir::market::testing {

class Auditor {
public:
    Auditor(const Catalogue& catalogue, const LeaseRules& rules)
        : catalogue_(catalogue), rules_(rules) {}

    void pass(TimePoint now) {
        std::erase_if(leases_, [&](const auto& one) { return one.second.expires <= now; });
    }
    std::map<uint64_t, Lease>& leases() { return leases_; }
    std::vector<uint64_t> ids_of(const NodeKey& node) const {
        std::vector<uint64_t> out;
        for (const auto& [id, lease] : leases_) {
            if (lease.node == node) out.push_back(id);
        }
        return out;
    }
    uint64_t bytes_of(const NodeKey& node) const {
        uint64_t bytes = 0;
        for (const uint64_t id : ids_of(node)) {
            const Segment& segment = leases_.at(id).segment;
            for (const BankUnit& bank : catalogue_.banks()) {
                if (bank.layer == segment.layer) {
                    bytes += bank.expert_bytes * (segment.end - segment.begin);
                }
            }
        }
        return bytes;
    }
    uint32_t holders(LayerKey layer, uint32_t expert, LeaseState state) const {
        uint32_t count = 0;
        for (const auto& [id, lease] : leases_) {
            count += lease.state == state && lease.segment.layer == layer &&
                     lease.segment.begin <= expert && expert < lease.segment.end;
        }
        return count;
    }
    bool holds(const NodeKey& node, LayerKey layer, uint32_t expert) const {
        return std::ranges::any_of(leases_, [&](const auto& one) {
            const Lease& lease = one.second;
            return lease.node == node && lease.segment.layer == layer &&
                   lease.segment.begin <= expert && expert < lease.segment.end;
        });
    }
    // When a loading lease of the node may end, by the documented rule.
    TimePoint loading_expiry(const Lease& lease, TimePoint now) const {
        uint64_t missing = 0;
        for (const auto& [id, other] : leases_) {
            if (other.node == lease.node && other.state == LeaseState::kLoading) {
                missing += other.bytes - other.bytes_done;
            }
        }
        const auto time = [&](uint64_t bytes) {
            const milliseconds assumed =
                std::chrono::seconds(bytes / rules_.loading_bytes_per_second + 1);
            return std::max(assumed, rules_.loading_min);
        };
        const milliseconds hold =
            std::max(time(lease.bytes) * rules_.loading_patience, rules_.loading_hold);
        return std::min(now + time(missing), lease.loading_since + hold);
    }

private:
    const Catalogue& catalogue_;
    const LeaseRules& rules_;
    std::map<uint64_t, Lease> leases_;
};

}  // namespace kvasir::market::testing
