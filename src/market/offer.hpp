// Which segments a node is offered: the placement rule. Pure.
//
// Used by LeaseBook::offer(). Experts are taken level by level, the level being how many nodes
// serve or promise them, at most the target number of replicas: so a gap is filled before anything
// else, and once all targets are met, what a node has already or what is least served comes first.
// Within a level, in this order: what the node has in its cache, what it has begun to fetch, fewer
// nodes, layers that it holds
// some of already, the run of experts that uses most of the budget, the run of which least is left
// over (large gaps stay whole for large nodes), and a hash of the seed. Every level is exhausted
// before the next: whatever is not offered does not fit what is left of the budget.
// Thread: pure. Limits: segments_max choices.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.hpp"
#include "market/catalogue.hpp"
#include "market/coverage.hpp"

namespace kvasir::market {

struct OfferInput {
    std::vector<Segment> held;  // by this node: not offered again
    // In its cache, and of what it has bytes; what the catalogue does not contain is ignored.
    std::vector<Segment> have;
    std::vector<Segment> begun;
    uint64_t bytes_left = 0;
    uint32_t replicas_target = 1;
    uint32_t segments_max = 1;
    uint64_t seed = 0;
};

// Disjoint, ordered by (layer, begin), neighbours merged; together at most bytes_left bytes.
std::vector<Segment> choose_segments(const Catalogue& catalogue, const Coverage& coverage,
                                     const OfferInput& input);

}  // namespace kvasir::market
