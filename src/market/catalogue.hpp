// What a market trades: the experts of one model, bank by bank, with their bytes.
//
// Used by the lease rules and the coordinator. Built from a model or from an outline's model. Banks
// of MTP layers are left out: no graph of today's llama.cpp runs them, so whoever held their
// experts would serve nobody. A bank's experts are all of one size.
// Thread: immutable after making. Owns: the list. Limits: those of moe::Model.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "moe/model.hpp"

namespace kvasir::market {

struct BankUnit {
    LayerKey layer;
    uint32_t experts = 0;
    uint64_t expert_bytes = 0;  // all slabs of one expert; not zero
};

class Catalogue {
public:
    // Banks in any order; keys are distinct, no bank is empty (KVASIR_CHECK).
    explicit Catalogue(std::vector<BankUnit> banks);
    static Catalogue from(const moe::Model& model);

    const std::vector<BankUnit>& banks() const { return banks_; }  // ordered by layer
    std::optional<size_t> find(LayerKey layer) const;              // index into banks()
    bool contains(const Segment& segment) const;                   // and it is not empty
    // Precondition (KVASIR_CHECK): contains().
    uint64_t bytes(const Segment& segment) const;
    uint64_t experts_total() const { return experts_total_; }
    uint64_t bytes_total() const { return bytes_total_; }
    uint64_t expert_bytes_min() const;  // 0 if there is no bank

private:
    // Constant after construction.
    std::vector<BankUnit> banks_;
    uint64_t experts_total_ = 0;
    uint64_t bytes_total_ = 0;
};

}  // namespace kvasir::market
