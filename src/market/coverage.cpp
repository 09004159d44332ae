#include "market/coverage.hpp"

#include <algorithm>
#include <limits>

#include "base/check.hpp"

namespace kvasir::market {

Coverage::Coverage(const Catalogue& catalogue)
    : catalogue_(catalogue), gaps_(catalogue.experts_total()) {
    for (const BankUnit& bank : catalogue.banks()) counts_.emplace_back(bank.experts);
}

void Coverage::change(const Segment& segment, LeaseState state, bool is_more) {
    KVASIR_CHECK(catalogue_.contains(segment));
    auto& bank = counts_[*catalogue_.find(segment.layer)];
    for (uint32_t e = segment.begin; e < segment.end; ++e) {
        Counts& counts = bank[e];
        uint32_t& count = state == LeaseState::kServing ? counts.serving : counts.loading;
        KVASIR_CHECK(is_more || count > 0);
        gaps_ -= counts == Counts{};
        count += is_more ? 1 : -1;
        gaps_ += counts == Counts{};
    }
}

void Coverage::add(const Segment& segment, LeaseState state) {
    change(segment, state, true);
}

void Coverage::remove(const Segment& segment, LeaseState state) {
    change(segment, state, false);
}

uint32_t Coverage::promised_min(const Segment& segment) const {
    const size_t bank = *catalogue_.find(segment.layer);
    uint32_t least = std::numeric_limits<uint32_t>::max();
    for (uint32_t e = segment.begin; e < segment.end; ++e) {
        least = std::min(least, promised(bank, e));
    }
    return least;
}

CoverageMap Coverage::map(uint32_t replicas_target) const {
    CoverageMap out;
    out.replicas_target = replicas_target;
    out.experts_total = catalogue_.experts_total();
    for (size_t b = 0; b < counts_.size(); ++b) {
        BankCoverage bank{catalogue_.banks()[b], {}};
        for (uint32_t e = 0; e < counts_[b].size(); ++e) {
            const Counts& here = counts_[b][e];
            out.experts_serving += here.serving > 0;
            out.experts_promised += here.serving + here.loading > 0;
            if (e > 0 && here == counts_[b][e - 1]) {
                ++bank.ranges.back().end;
            } else {
                bank.ranges.push_back({e, e + 1, here.serving, here.loading});
            }
        }
        out.banks.push_back(std::move(bank));
    }
    return out;
}

}  // namespace kvasir::market
