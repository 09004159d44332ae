// How many nodes serve, and how many promise to serve, each expert.
//
// Used by the lease rules; the map is what the API and a dashboard show, and what a price (demand x
// scarcity) will be made of. Serving counts proven holders with a live lease, loading counts
// promises: only the former is coverage.
// Thread: the owner serialises. Owns: two counters an expert. Limits: those of Catalogue.
#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.hpp"
#include "market/catalogue.hpp"

namespace kvasir::market {

enum class LeaseState : uint8_t { kLoading = 0, kServing = 1 };  // stored: never renumber

// Neighbouring experts with equal counts.
struct CoverageRange {
    uint32_t begin = 0;
    uint32_t end = 0;
    uint32_t serving = 0;
    uint32_t loading = 0;
};
struct BankCoverage {
    BankUnit bank;
    std::vector<CoverageRange> ranges;  // ascending, without holes, from 0 to bank.experts
};
struct CoverageMap {
    uint32_t replicas_target = 0;
    uint64_t experts_total = 0;
    uint64_t experts_serving = 0;   // with at least one serving node
    uint64_t experts_promised = 0;  // with at least one serving or loading node
    std::vector<BankCoverage> banks;
};

class Coverage {
public:
    explicit Coverage(const Catalogue& catalogue);

    // Preconditions (KVASIR_CHECK): the catalogue contains the segment; remove() what was added.
    void add(const Segment& segment, LeaseState state);
    void remove(const Segment& segment, LeaseState state);
    uint32_t serving(size_t bank, uint32_t expert) const { return counts_[bank][expert].serving; }
    uint32_t promised(size_t bank, uint32_t expert) const {
        return counts_[bank][expert].serving + counts_[bank][expert].loading;
    }
    // The least number of serving or loading nodes over the experts of the segment.
    uint32_t promised_min(const Segment& segment) const;
    // Experts that nobody serves or promises.
    uint64_t gaps() const { return gaps_; }
    CoverageMap map(uint32_t replicas_target) const;

private:
    struct Counts {
        uint32_t serving = 0;
        uint32_t loading = 0;
        bool operator==(const Counts&) const = default;
    };
    void change(const Segment& segment, LeaseState state, bool is_more);

    const Catalogue& catalogue_;
    std::vector<std::vector<Counts>> counts_;  // [bank][expert]
    uint64_t gaps_ = 0;
};

}  // namespace kvasir::market
