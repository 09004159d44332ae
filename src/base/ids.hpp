// Strong ids and digests shared by every module.
//
// Used everywhere. A LayerKey names one bank of experts: nearly every model has one bank a layer
// (bank 0); a few (grovemoe) have a second bank of "chunk" experts in the same layer (bank 1).
// Thread: values.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>

namespace kvasir {

struct LayerKey {
    uint32_t layer = 0;
    uint32_t bank = 0;  // 0: ffn_*_exps, 1: ffn_*_chexps
    auto operator<=>(const LayerKey&) const = default;
};

struct ExpertId {
    LayerKey layer;
    uint32_t index = 0;
    auto operator<=>(const ExpertId&) const = default;
};

// Half-open expert range [begin, end) of one bank: the unit of coverage.
struct Segment {
    LayerKey layer;
    uint32_t begin = 0;
    uint32_t end = 0;
    uint32_t count() const { return end - begin; }
    auto operator<=>(const Segment&) const = default;
};

using Sha256 = std::array<uint8_t, 32>;

std::string to_hex(const Sha256& digest);
// "12" for bank 0, "12c" for bank 1.
std::string to_string(LayerKey layer);

}  // namespace kvasir
