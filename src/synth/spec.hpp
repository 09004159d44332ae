// What kvasir-synth can write: a preset, an architecture and switches, checked before any byte.
//
// Used by the kvasir-synth program and, in process, by tests and benchmarks. A spec that
// check_spec() accepts is one that stock llama.cpp v0.5.0 loads and runs; anything else is refused
// with one sentence (kUsage) that names the switch. Same spec, same bytes.
// Thread: values. Owns: nothing. Limits: the constants below.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace kvasir::synth {

constexpr uint32_t kLayersMax = 511;    // llama.cpp: 512 with the MTP layer
constexpr uint32_t kExpertsMax = 1024;  // llama.cpp: LLAMA_MAX_EXPERTS
constexpr uint32_t kWidthMax = 65536;   // of --embd and --ff
constexpr uint32_t kVocabMin = 288;     // 256 bytes, some syllables, three control tokens
constexpr uint32_t kVocabMax = 1'000'000;
constexpr uint32_t kSplitsMax = 1024;
constexpr uint32_t kAlignmentMin = 32;  // ggml aborts when it maps tensors at less
constexpr uint32_t kAlignmentMax = 1 << 20;

enum class Preset : uint8_t { kTiny, kQwen35_122b };
enum class TensorOrder : uint8_t { kFile, kReverse, kShuffle };

struct SynthSpec {
    Preset preset = Preset::kTiny;
    std::string arch = "qwen35moe";  // general.architecture; see architectures()
    uint32_t layers = 4;             // trunk layers, the MTP layer not counted
    bool mtp = false;                // one MTP (nextn) layer after the trunk
    uint32_t embd = 256;             // hidden width
    uint32_t ff = 256;               // width of one expert
    uint32_t experts = 8;
    uint32_t used = 2;  // experts per token
    uint32_t vocab = 512;
    std::optional<uint32_t> shared;  // shared experts; the architecture's default if not set

    uint32_t type = 12;                 // ggml type of gate/up experts (12: Q4_K)
    std::optional<uint32_t> type_down;  // of down experts; as `type` if not set
    uint32_t type_dense = 1;            // of every other matrix (1: F16)

    // Masks have one character a trunk layer, '1' for yes. Empty: the architecture's default.
    std::string fused;                 // gate and up in one tensor (same values as apart)
    bool fused_swap = false;           // halves of fused tensors exchanged: a wrong file on purpose
    std::string dense;                 // a dense FFN instead of experts
    std::optional<int64_t> dense_key;  // leading_dense_block_count to claim; -1: no such key
    bool bias = false;                 // per-expert biases (gpt-oss always has them)
    bool scale = false;                // per-expert scales

    uint32_t splits = 1;  // 1: one file; more: <stem>-00001-of-0000N.gguf
    uint32_t alignment = 32;
    TensorOrder order = TensorOrder::kFile;
    uint8_t pad_byte = 0;  // value of the bytes between tensors
    uint64_t seed = 1;
    bool sparse = false;  // real header, tensor data left as holes (zeros)
    bool sync = true;     // fsync before the rename; false for scratch files
};

// What stock llama.cpp takes from one architecture.
enum class DenseRule : uint8_t { kNone, kLeading, kAny };
struct Architecture {
    std::string_view name;
    bool fused = false;
    bool bias_always = false;
    bool scale = false;
    bool mtp = false;
    bool mtp_with_scale = false;
    DenseRule dense = DenseRule::kNone;
    uint32_t dense_first = 0;  // default number of leading dense layers
    uint32_t shared_min = 0, shared_max = 0, shared_default = 0;
    std::string_view what;  // one line for --help
};
const std::vector<Architecture>& architectures();
const Architecture* find_architecture(std::string_view name);

// The 122B preset: 48 layers and, with `mtp`, the MTP layer.
SynthSpec qwen35_122b(uint32_t layers = 48, bool mtp = true);

// A ggml type by its name in any case ("q4_k", "Q4_K", "bf16"); kUsage with the list of names.
// Only types that hold weights and that the CPU backend multiplies by.
Result<uint32_t> parse_type(std::string_view text);
std::vector<std::string> type_names();

// '0'/'1' text as a mask over `layers`; kUsage names `flag` when length or a character is off.
Result<std::string> parse_mask(std::string_view flag, std::string_view text, uint32_t layers);

// kUsage, naming the switch, unless stock llama.cpp loads what the spec says.
Status check_spec(const SynthSpec& spec);

// Facts derived from a checked spec.
bool layer_is_dense(const SynthSpec& spec, uint32_t layer);
bool layer_is_fused(const SynthSpec& spec, uint32_t layer);
uint32_t shared_experts(const SynthSpec& spec);
uint32_t moe_layers(const SynthSpec& spec);  // MTP layer included

}  // namespace kvasir::synth
