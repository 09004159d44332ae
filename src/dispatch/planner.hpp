// The planner: which holder computes which expert of one layer of one batch. Pure.
//
// Used by the backbone's lanes. Experts are assigned whole (all rows of an expert go to one
// holder); each goes where it is finished soonest by measured costs. A worker not asked so far must
// gain more than its request costs, so few workers are touched when pairs are few and load is even
// when they are many. What nobody usable holds stays with the backbone.
//
// Thread: reentrant. Limits: none; O(groups * holders).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvasir::dispatch {

constexpr int32_t kBackbone = -1;

// All rows of one expert in this batch.
struct Group {
    uint32_t pairs = 0;
    std::span<const uint32_t> holders;  // indices into the costs, any order
};

// What one request to a holder costs, as measured.
struct HolderCost {
    double request_us = 100;  // fixed: round trip and set-up
    double pair_us = 1000;    // per pair
    double queued_us = 0;     // work already under way there
    bool usable = true;
};

// For each group the index of its holder, or kBackbone.
std::vector<int32_t> plan(std::span<const Group> groups, std::span<const HolderCost> costs);
// The same without allocating: `out` is resized, `busy_us` is scratch.
void plan_into(std::span<const Group> groups, std::span<const HolderCost> costs,
               std::vector<int32_t>& out, std::vector<double>& busy_us);

}  // namespace kvasir::dispatch
