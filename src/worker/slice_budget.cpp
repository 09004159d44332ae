#include "worker/slice_budget.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "moe/segments.hpp"

namespace kvasir::worker {
namespace {

// In a slice's header: a digest (u64 length, 64 digits) a slab and a number an expert; in its data
// nothing, since the slabs of a tensor lie side by side.
uint64_t header_bytes(const moe::ExpertBank& bank) {
    return bank.tensors.size() * (8 + 64) + 4;
}

}  // namespace

Result<uint64_t> lease_budget(const moe::Outline& outline, uint64_t budget_bytes) {
    std::vector<Segment> one_each;
    uint64_t smallest = UINT64_MAX;
    double share = 1;  // of the budget beyond the fixed part that is slabs
    for (const moe::ExpertBank& bank : outline.model.banks) {
        one_each.push_back({bank.key, 0, 1});
        const uint64_t slabs = bank.expert_bytes();
        smallest = std::min(smallest, slabs);
        share = std::min(
            share, static_cast<double>(slabs) / static_cast<double>(slabs + header_bytes(bank)));
    }
    if (one_each.empty()) return fail(Errc::kBadInput, "the market's model has no experts");
    auto plan = moe::plan_slice(outline, one_each);
    if (!plan) return tl::unexpected(plan.error());
    const uint64_t fixed = plan->file_bytes - plan->bytes_slabs;
    const uint64_t rest = budget_bytes > fixed ? budget_bytes - fixed : 0;
    const auto slabs = static_cast<uint64_t>(static_cast<double>(rest) * share);
    if (slabs >= smallest) return slabs;
    const uint64_t least = fixed + static_cast<uint64_t>(static_cast<double>(smallest) / share) + 2;
    return fail(Errc::kUsage, "--budget " + std::to_string(budget_bytes) +
                                  " is too small: one expert of this model needs " +
                                  std::to_string(least) + " bytes");
}

Result<FittingLeases> fit_leases(const moe::Outline& outline, std::vector<NodeLease> leases,
                                 uint64_t budget_bytes) {
    FittingLeases out;
    out.kept = std::move(leases);
    while (!out.kept.empty()) {
        std::vector<Segment> segments;
        for (const NodeLease& lease : out.kept) segments.push_back(lease.segment);
        auto plan = moe::plan_slice(outline, moe::normalise(std::move(segments)));
        if (!plan) return tl::unexpected(plan.error());
        if (plan->file_bytes <= budget_bytes) break;
        const auto least = std::ranges::min_element(out.kept, {}, &NodeLease::bytes);
        out.dropped.push_back(least->id);
        out.kept.erase(least);
    }
    return out;
}

}  // namespace kvasir::worker
