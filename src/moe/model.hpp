// A model as Kvasir sees it: every tensor in exactly one class, every expert a list of slabs.
//
// Used by inspect, slice, manifest, worker and backbone. open_model() reads one GGUF file or a set
// of splits (any part may be named; the order comes from split.no), classifies each tensor by name,
// suffix *and* shape, and lays out the expert banks. A tensor with an expert dimension that it does
// not know is an error, not a guess. A slice (a mini-GGUF with kvasir.* keys) opens the same way:
// its banks then hold local experts, and `global_ids` says which they are.
// Thread: immutable after opening, share freely. Owns: headers, no tensor data.
// Limits: kBankExpertsMax experts in a bank, kModelExpertsMax in a model, kLayersMax layers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "moe/gguf.hpp"

namespace kvasir::moe {

constexpr uint32_t kBankExpertsMax = 1 << 16;
constexpr uint32_t kModelExpertsMax = 1 << 20;

// Which matrix of the expert FFN, and which tensor of it. Values are wire values: never renumber.
enum class SlabRole : uint8_t { kGate = 0, kUp = 1, kDown = 2, kGateUp = 3 };
enum class SlabPart : uint8_t { kWeight = 0, kBias = 1, kScale = 2 };

std::string_view to_string(SlabRole role);  // "gate", "up", "down", "gate_up"
std::string_view to_string(SlabPart part);  // "weight", "bias", "scale"

// One stacked tensor of a bank. The slab of expert e is the `slab_bytes` bytes at
// `offset + e * slab_bytes` of shard `shard`.
//   weight: ne = {n_in, n_out, n_expert}   bias: {n_out, n_expert}   scale: {n_expert}
struct SlabTensor {
    std::string name;
    SlabRole role = SlabRole::kGate;
    SlabPart part = SlabPart::kWeight;
    uint32_t type = 0;    // ggml type
    uint64_t n_in = 0;    // row length (weights); 0 otherwise
    uint64_t n_out = 0;   // rows (weights), elements (bias), 1 (scale)
    uint32_t shard = 0;   // index into Model::shards
    uint64_t offset = 0;  // absolute in the shard file
    uint64_t slab_bytes = 0;
};

// One bank of experts of one layer.
struct ExpertBank {
    LayerKey key;
    uint32_t experts = 0;              // in this file (a slice: the local count)
    std::vector<uint32_t> global_ids;  // size `experts`; 0..experts-1 for a whole model
    std::vector<SlabTensor> tensors;   // ordered by (role, part): the canonical slab order
    bool is_mtp = false;               // belongs to an MTP/nextn layer
    uint64_t expert_bytes() const;     // sum of slab_bytes
    const SlabTensor* find(SlabRole role, SlabPart part) const;
    // "gate+up+down", "gate_up+down", "up+down", plus "+bias", "+scale" where present.
    std::string layout_name() const;
};

enum class TensorClass : uint8_t {
    kExpert,     // slabs: the swarm
    kAttention,  // q/k/v/o, their norms, biases, sinks, indexers, MLA projections
    kRecurrent,  // DeltaNet / SSM / conv / RWKV-like time mixing
    kNorm,
    kRouter,        // ffn_gate_inp*, exp_probs_b and other per-expert vectors of the router
    kSharedExpert,  // *_shexp
    kDenseFfn,
    kEmbedding,  // token_embd, position and type embeddings
    kOutput,     // output, classifier heads
    kOther,      // everything else of the trunk (rope factors, MTP projections, ...)
    kCount_,
};
std::string_view to_string(TensorClass tensor_class);

struct ClassTotal {
    uint64_t tensors = 0;
    uint64_t bytes = 0;
};

struct Model {
    std::string arch;
    std::string name;                // general.name, untrusted text
    std::vector<GgufHeader> shards;  // in split order
    std::vector<ExpertBank> banks;   // ordered by key; empty for a model without experts
    uint32_t layers_total = 0;       // block_count, MTP layers included
    uint32_t mtp_layers = 0;
    uint32_t experts_used = 0;  // k of the router; 0 if not a MoE
    uint64_t n_embd = 0;        // hidden width
    std::array<ClassTotal, static_cast<size_t>(TensorClass::kCount_)> totals = {};
    std::vector<std::string> warnings;  // metadata that disagrees with the tensors, in words

    bool is_slice = false;
    std::string slice_model_id;  // hex, kvasir.model_id of a slice

    uint64_t bytes_total() const;  // all tensor data
    uint64_t bytes_experts() const;
    uint64_t experts_total() const;
    const ExpertBank* find_bank(LayerKey key) const;
};

// Errors: kEnvironment, kBadInput (splits missing/doubled by number, duplicate tensor names,
// unknown expert-shaped tensor, slab not block-aligned or outside the file), kLimit, kUnsupported
// (the old one-tensor-per-expert layout, refused by name).
Result<Model> open_model(const std::string& path);

// The part of open_model() behind the files: headers in split order -> model (for the fuzzer and
// for headers that came over the network). Errors: kBadInput, kLimit, kUnsupported.
Result<Model> lay_out_model(std::vector<GgufHeader> shards);

// The class of one tensor; nullopt with an expert dimension it cannot place. `n_expert` is
// the architecture's expert count (0: none).
std::optional<TensorClass> classify_tensor(const GgufTensor& tensor, uint64_t n_expert);

}  // namespace kvasir::moe
