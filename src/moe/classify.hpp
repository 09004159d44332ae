// What a tensor is, from its name, suffix and shape: the naming of llama.cpp, all architectures.
//
// Used by model.cpp and inspect. A tensor name is `[enc.|dec.]blk.N.<base>[.<suffix>]` or
// `<base>[.<suffix>]`; the base decides through one table of every base llama.cpp v0.5.0 knows, the
// suffix says weight, bias or scale, and the shape confirms it. Thread: pure functions.
// Limits: block numbers below kLayersMax.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/ids.hpp"
#include "moe/model.hpp"

namespace kvasir::moe {

constexpr uint32_t kLayersMax = 1 << 16;

// Views into the name that was parsed.
struct TensorName {
    std::optional<uint32_t> layer;  // N of `blk.N.`, also behind `enc.` and `dec.`
    std::string_view base;          // "ffn_gate_exps", "nextn.eh_proj", "token_embd"
    std::string_view suffix;        // "weight", "bias", "scale", ...; empty if there is none
};
TensorName parse_tensor_name(std::string_view name);

// A tensor of an expert bank, by name alone: `blk.N.ffn_{gate,up,down,gate_up}_{exps,chexps}` with
// suffix weight, bias or scale. `input_scale` is not one: it only feeds activation quantisers that
// the CPU graph never runs, so it stays whole with the router's per-expert vectors.
struct ExpertTensorName {
    LayerKey key;
    SlabRole role = SlabRole::kGate;
    SlabPart part = SlabPart::kWeight;
};
std::optional<ExpertTensorName> parse_expert_name(std::string_view name);

// The layout from before stacked experts: `blk.N.ffn_{gate,up,down}.E.weight`.
bool is_one_tensor_per_expert(std::string_view name);

// True if `tensor` has the shape that `part` needs: weight {in, out, experts}, bias {out, experts},
// scale {experts}. Trailing dimensions of 1 may have been dropped by a writer.
bool has_expert_shape(const GgufTensor& tensor, SlabPart part);
// Number of experts of a tensor of that shape.
uint64_t expert_count(const GgufTensor& tensor, SlabPart part);

}  // namespace kvasir::moe
