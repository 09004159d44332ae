// How much to ask leases for, so that the slice file, header and padding included, fits a budget.
//
// Used by the agent. Pure. Thread: any. Limits: those of plan_slice().
#pragma once

#include <cstdint>
#include <vector>

#include "base/result.hpp"
#include "moe/outline.hpp"
#include "worker/market_client.hpp"

namespace kvasir::worker {

// Bytes of slabs that fit a file of `budget_bytes`. Errors: kUsage, when not even one expert fits:
// says how much one needs; those of plan_slice().
Result<uint64_t> lease_budget(const moe::Outline& outline, uint64_t budget_bytes);

struct FittingLeases {
    std::vector<NodeLease> kept;
    std::vector<uint64_t> dropped;  // the smallest ones, if the file would be too long
};
// Errors: those of plan_slice() (leases of experts that the model does not have).
Result<FittingLeases> fit_leases(const moe::Outline& outline, std::vector<NodeLease> leases,
                                 uint64_t budget_bytes);

}  // namespace kvasir::worker
