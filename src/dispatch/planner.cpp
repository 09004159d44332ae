#include "dispatch/planner.hpp"

#include <limits>

namespace kvasir::dispatch {

void plan_into(std::span<const Group> groups, std::span<const HolderCost> costs,
               std::vector<int32_t>& out, std::vector<double>& busy_us) {
    out.assign(groups.size(), kBackbone);
    busy_us.assign(costs.size(), 0);
    for (size_t g = 0; g < groups.size(); ++g) {
        double best_us = std::numeric_limits<double>::infinity();
        double best_end_us = 0;
        for (uint32_t holder : groups[g].holders) {
            if (holder >= costs.size() || !costs[holder].usable) continue;
            const HolderCost& cost = costs[holder];
            const bool fresh = busy_us[holder] == 0;
            const double start_us = fresh ? cost.request_us + cost.queued_us : busy_us[holder];
            const double end_us = start_us + cost.pair_us * groups[g].pairs;
            // A further worker costs a request of its own: it has to gain more than that.
            const double weighed_us = end_us + (fresh ? cost.request_us : 0);
            if (weighed_us < best_us) {
                best_us = weighed_us;
                best_end_us = end_us;
                out[g] = static_cast<int32_t>(holder);
            }
        }
        if (out[g] != kBackbone) busy_us[static_cast<size_t>(out[g])] = best_end_us;
    }
}

std::vector<int32_t> plan(std::span<const Group> groups, std::span<const HolderCost> costs) {
    std::vector<int32_t> out;
    std::vector<double> busy_us;
    plan_into(groups, costs, out, busy_us);
    return out;
}

}  // namespace kvasir::dispatch
