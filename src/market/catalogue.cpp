#include "market/catalogue.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace kvasir::market {

Catalogue::Catalogue(std::vector<BankUnit> banks) : banks_(std::move(banks)) {
    std::sort(banks_.begin(), banks_.end(),
              [](const BankUnit& a, const BankUnit& b) { return a.layer < b.layer; });
    for (size_t i = 0; i < banks_.size(); ++i) {
        KVASIR_CHECK(banks_[i].experts > 0 && banks_[i].expert_bytes > 0);
        KVASIR_CHECK(i == 0 || banks_[i - 1].layer != banks_[i].layer);
        experts_total_ += banks_[i].experts;
        bytes_total_ += banks_[i].experts * banks_[i].expert_bytes;
    }
}

Catalogue Catalogue::from(const moe::Model& model) {
    std::vector<BankUnit> banks;
    for (const moe::ExpertBank& bank : model.banks) {
        if (bank.is_mtp || bank.experts == 0 || bank.expert_bytes() == 0) continue;
        banks.push_back({bank.key, bank.experts, bank.expert_bytes()});
    }
    return Catalogue(std::move(banks));
}

std::optional<size_t> Catalogue::find(LayerKey layer) const {
    const auto at =
        std::lower_bound(banks_.begin(), banks_.end(), layer,
                         [](const BankUnit& bank, LayerKey key) { return bank.layer < key; });
    if (at == banks_.end() || at->layer != layer) return std::nullopt;
    return static_cast<size_t>(at - banks_.begin());
}

bool Catalogue::contains(const Segment& segment) const {
    const auto bank = find(segment.layer);
    return bank && segment.begin < segment.end && segment.end <= banks_[*bank].experts;
}

uint64_t Catalogue::bytes(const Segment& segment) const {
    KVASIR_CHECK(contains(segment));
    return banks_[*find(segment.layer)].expert_bytes * segment.count();
}

uint64_t Catalogue::expert_bytes_min() const {
    uint64_t least = 0;
    for (const BankUnit& bank : banks_) {
        if (least == 0 || bank.expert_bytes < least) least = bank.expert_bytes;
    }
    return least;
}

}  // namespace kvasir::market
