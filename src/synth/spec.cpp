#include "synth/spec.hpp"

#include <ggml.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "base/log.hpp"

namespace kvasir::synth {
namespace {

// Weight types that ggml both quantises to and multiplies by on the CPU.
constexpr std::array kTypes = {
    GGML_TYPE_F32,     GGML_TYPE_F16,    GGML_TYPE_BF16,  GGML_TYPE_Q4_0,    GGML_TYPE_Q4_1,
    GGML_TYPE_Q5_0,    GGML_TYPE_Q5_1,   GGML_TYPE_Q8_0,  GGML_TYPE_Q2_K,    GGML_TYPE_Q3_K,
    GGML_TYPE_Q4_K,    GGML_TYPE_Q5_K,   GGML_TYPE_Q6_K,  GGML_TYPE_IQ1_S,   GGML_TYPE_IQ1_M,
    GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS, GGML_TYPE_IQ2_S, GGML_TYPE_IQ3_XXS, GGML_TYPE_IQ3_S,
    GGML_TYPE_IQ4_NL,  GGML_TYPE_IQ4_XS, GGML_TYPE_TQ1_0, GGML_TYPE_TQ2_0,   GGML_TYPE_MXFP4,
    GGML_TYPE_NVFP4,   GGML_TYPE_Q1_0,   GGML_TYPE_Q2_0,
};

std::string lower(std::string_view text) {
    std::string out(text);
    std::transform(out.begin(), out.end(), out.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return out;
}

bool known_type(uint32_t type) {
    return std::any_of(kTypes.begin(), kTypes.end(),
                       [&](ggml_type known) { return static_cast<uint32_t>(known) == type; });
}

Status usage(std::string detail) {
    return fail(Errc::kUsage, std::move(detail));
}

Status check_range(std::string_view flag, uint64_t value, uint64_t low, uint64_t high) {
    if (value >= low && value <= high) return {};
    return usage(std::string(flag) + " is " + std::to_string(value) + ": use " +
                 std::to_string(low) + " to " + std::to_string(high));
}

Status check_row(std::string_view flag, uint32_t type, std::string_view what, uint64_t width) {
    if (!known_type(type)) {
        return usage(std::string(flag) + ": ggml type " + std::to_string(type) +
                     " does not hold weights; see --help for the names");
    }
    const auto block = static_cast<uint64_t>(ggml_blck_size(static_cast<ggml_type>(type)));
    if (width % block == 0) return {};
    return usage(std::string(flag) + " " + ggml_type_name(static_cast<ggml_type>(type)) +
                 " needs rows of a multiple of " + std::to_string(block) + ", but " +
                 std::string(what) + " is " + std::to_string(width));
}

Status check_widths(const SynthSpec& spec) {
    for (auto [flag, width] : {std::pair{"--embd", spec.embd}, std::pair{"--ff", spec.ff}}) {
        if (auto ok = check_range(flag, width, 16, kWidthMax); !ok) return ok;
        if (width % 16 != 0) {
            return usage(std::string(flag) + " is " + std::to_string(width) +
                         ": use a multiple of 16");
        }
    }
    if (auto ok = check_row("--type", spec.type, "--embd", spec.embd); !ok) return ok;
    const bool down_set = spec.type_down.has_value();
    if (auto ok = check_row(down_set ? "--type-down" : "--type", spec.type_down.value_or(spec.type),
                            "--ff (the row of the down matrix)", spec.ff);
        !ok) {
        return ok;
    }
    return check_row("--type-dense", spec.type_dense, "--embd", spec.embd);
}

Status check_counts(const SynthSpec& spec) {
    // llama.cpp's qwen35moe wants a recurrent layer and a layer with full attention.
    const uint32_t layers_min = spec.arch == "qwen35moe" ? 2 : 1;
    if (auto ok = check_range("--layers", spec.layers, layers_min, kLayersMax); !ok) return ok;
    if (auto ok = check_range("--experts", spec.experts, 1, kExpertsMax); !ok) return ok;
    if (auto ok = check_range("--used", spec.used, 1, spec.experts); !ok) return ok;
    if (auto ok = check_range("--vocab", spec.vocab, kVocabMin, kVocabMax); !ok) return ok;
    if (auto ok = check_range("--splits", spec.splits, 1, kSplitsMax); !ok) return ok;
    if (auto ok = check_range("--alignment", spec.alignment, kAlignmentMin, kAlignmentMax); !ok) {
        return ok;
    }
    if ((spec.alignment & (spec.alignment - 1)) != 0) {
        return usage("--alignment " + std::to_string(spec.alignment) + " is not a power of two");
    }
    if (spec.sparse && spec.pad_byte != 0) {
        return usage("--pad-byte does not go with --sparse: holes read as zeros");
    }
    return {};
}

Status check_dense(const SynthSpec& spec, const Architecture& arch) {
    const std::string name(arch.name);
    if (!spec.dense.empty()) {
        if (auto mask = parse_mask("--dense-mask", spec.dense, spec.layers); !mask) {
            return tl::unexpected(mask.error());
        }
    } else if (arch.dense_first > spec.layers) {
        return usage("--layers " + std::to_string(spec.layers) + " is fewer than the " +
                     std::to_string(arch.dense_first) + " leading dense layers of " + name);
    }
    const bool any = spec.dense.find('1') != std::string::npos;
    if (any && arch.dense == DenseRule::kNone) {
        return usage("--dense-first/--dense-mask: every layer of " + name +
                     " has experts; use --arch deepseek2 or hy_v3");
    }
    if (spec.dense.find("01") != std::string::npos && arch.dense != DenseRule::kAny) {
        return usage("--dense-mask " + spec.dense + ": " + name +
                     " takes dense layers only in front; use --arch hy_v3");
    }
    if (spec.dense_key && arch.dense != DenseRule::kAny) {
        return usage(
            "--dense-key: llama.cpp does not load " + name +
            " with another leading_dense_block_count than its tensors have; use --arch hy_v3");
    }
    if (spec.dense_key && (*spec.dense_key < -1 || *spec.dense_key > kLayersMax)) {
        return usage("--dense-key must be 'none' or 0 to " + std::to_string(kLayersMax));
    }
    return {};
}

Status check_features(const SynthSpec& spec, const Architecture& arch) {
    const std::string name(arch.name);
    if (!spec.fused.empty()) {
        if (auto mask = parse_mask("--fused-mask", spec.fused, spec.layers); !mask) {
            return tl::unexpected(mask.error());
        }
    }
    const bool fused = spec.fused.find('1') != std::string::npos;
    if (fused && !arch.fused) {
        return usage("--fused: llama.cpp knows no fused gate_up experts for " + name +
                     "; use --arch qwen35moe, deepseek2 or hy_v3");
    }
    if (spec.fused_swap && !fused) return usage("--fused-swap needs --fused or --fused-mask");
    if (spec.bias && !arch.bias_always) {
        return usage("--bias: llama.cpp knows no expert biases for " + name +
                     "; use --arch gpt-oss");
    }
    if (spec.scale && !arch.scale) {
        return usage("--scale: llama.cpp applies no per-expert scales for " + name +
                     "; use --arch qwen35moe, qwen3moe, hy_v3 or llama");
    }
    if (spec.mtp && !arch.mtp) {
        return usage("--mtp: llama.cpp knows no MTP layer for " + name +
                     "; use --arch qwen35moe, deepseek2 or hy_v3");
    }
    if (spec.mtp && spec.scale && !arch.mtp_with_scale) {
        return usage("--scale does not go with --mtp for " + name +
                     ": llama.cpp leaves the MTP layer out, and then misses its scales; leave out "
                     "one of the two, or use --arch hy_v3");
    }
    const uint32_t shared = shared_experts(spec);
    if (shared < arch.shared_min || shared > arch.shared_max) {
        return usage("--shared " + std::to_string(shared) + ": " + name + " takes " +
                     std::to_string(arch.shared_min) + " to " + std::to_string(arch.shared_max));
    }
    return check_dense(spec, arch);
}

// The large preset keeps its shape (and one full attention layer of each four: llama.cpp wants
// one); only what does not change it may be chosen.
Status check_preset(const SynthSpec& spec) {
    if (spec.preset != Preset::kQwen35_122b) return {};
    const SynthSpec fixed = qwen35_122b();
    const auto refuse = [](std::string_view flag) {
        return usage(std::string(flag) + " does not go with --preset qwen3.5-122b, which fixes it");
    };
    if (auto ok = check_range("--layers", spec.layers, 4, fixed.layers); !ok) return ok;
    if (spec.arch != fixed.arch) return refuse("--arch");
    if (spec.embd != fixed.embd) return refuse("--embd");
    if (spec.ff != fixed.ff) return refuse("--ff");
    if (spec.experts != fixed.experts) return refuse("--experts");
    if (spec.used != fixed.used) return refuse("--used");
    if (spec.vocab != fixed.vocab) return refuse("--vocab");
    if (spec.type != fixed.type || spec.type_down) return refuse("--type");
    if (spec.type_dense != fixed.type_dense) return refuse("--type-dense");
    if (shared_experts(spec) != 1) return refuse("--shared");
    if (!spec.fused.empty() || spec.fused_swap) return refuse("--fused");
    if (!spec.dense.empty() || spec.dense_key) return refuse("--dense-mask");
    if (spec.scale) return refuse("--scale");
    if (spec.bias) return refuse("--bias");
    return {};
}

}  // namespace

const std::vector<Architecture>& architectures() {
    static const std::vector<Architecture> kList = [] {
        std::vector<Architecture> list(6);
        list[0] = {.name = "qwen35moe",
                   .fused = true,
                   .scale = true,
                   .mtp = true,
                   .shared_min = 1,
                   .shared_max = 16,
                   .shared_default = 1,
                   .what = "DeltaNet and attention, gated shared expert"};
        list[1] = {
            .name = "qwen3moe", .scale = true, .what = "attention, gate/up/down, no shared expert"};
        list[2] = {.name = "deepseek2",
                   .fused = true,
                   .mtp = true,
                   .dense = DenseRule::kLeading,
                   .dense_first = 1,
                   .shared_min = 1,
                   .shared_max = 16,
                   .shared_default = 1,
                   .what = "latent attention, dense first, exp_probs_b.bias, shared experts"};
        list[3] = {.name = "gpt-oss",
                   .bias_always = true,
                   .what = "biases on experts and router, clamped SwiGLU, attention sinks"};
        list[4] = {.name = "hy_v3",
                   .fused = true,
                   .scale = true,
                   .mtp = true,
                   .mtp_with_scale = true,
                   .dense = DenseRule::kAny,
                   .shared_min = 1,
                   .shared_max = 16,
                   .shared_default = 1,
                   .what = "dense or MoE per layer, fused or not per layer, exp_probs_b"};
        list[5] = {.name = "llama", .scale = true, .what = "Mixtral-like"};
        return list;
    }();
    return kList;
}

const Architecture* find_architecture(std::string_view name) {
    for (const Architecture& arch : architectures()) {
        if (arch.name == name) return &arch;
    }
    return nullptr;
}

SynthSpec qwen35_122b(uint32_t layers, bool mtp) {
    SynthSpec spec;
    spec.preset = Preset::kQwen35_122b;
    spec.layers = layers;
    spec.mtp = mtp;
    spec.embd = 3072;
    spec.ff = 1024;
    spec.experts = 256;
    spec.used = 8;
    spec.vocab = 248'320;
    return spec;
}

Result<uint32_t> parse_type(std::string_view text) {
    const std::string wanted = lower(text);
    std::string names;
    for (ggml_type type : kTypes) {
        const std::string name = lower(ggml_type_name(type));
        if (name == wanted) return static_cast<uint32_t>(type);
        names += (names.empty() ? "" : " ") + name;
    }
    return fail(Errc::kUsage, "no tensor type '" + printable(text, 40) + "'; known: " + names);
}

std::vector<std::string> type_names() {
    std::vector<std::string> names;
    for (ggml_type type : kTypes) names.push_back(lower(ggml_type_name(type)));
    return names;
}

Result<std::string> parse_mask(std::string_view flag, std::string_view text, uint32_t layers) {
    if (text.find_first_not_of("01") != std::string_view::npos || text.size() != layers) {
        return fail(Errc::kUsage, std::string(flag) + " '" + printable(text, 40) + "' must be " +
                                      std::to_string(layers) +
                                      " characters (one a layer) of 0 and 1");
    }
    return std::string(text);
}

Status check_spec(const SynthSpec& spec) {
    const Architecture* arch = find_architecture(spec.arch);
    if (arch == nullptr) {
        std::string names;
        for (const Architecture& known : architectures()) names += " " + std::string(known.name);
        return usage("no architecture '" + printable(spec.arch, 40) + "'; known:" + names);
    }
    if (auto ok = check_preset(spec); !ok) return ok;
    if (auto ok = check_counts(spec); !ok) return ok;
    if (auto ok = check_widths(spec); !ok) return ok;
    return check_features(spec, *arch);
}

bool layer_is_dense(const SynthSpec& spec, uint32_t layer) {
    if (layer >= spec.layers) return false;  // the MTP layer
    if (!spec.dense.empty()) return spec.dense[layer] == '1';
    const Architecture* arch = find_architecture(spec.arch);
    return arch != nullptr && layer < arch->dense_first;
}

bool layer_is_fused(const SynthSpec& spec, uint32_t layer) {
    // The MTP layer follows the last trunk layer.
    if (spec.fused.empty()) return false;
    return spec.fused[std::min(layer, spec.layers - 1)] == '1';
}

uint32_t shared_experts(const SynthSpec& spec) {
    const Architecture* arch = find_architecture(spec.arch);
    return spec.shared.value_or(arch == nullptr ? 0 : arch->shared_default);
}

uint32_t moe_layers(const SynthSpec& spec) {
    uint32_t count = spec.mtp ? 1 : 0;
    for (uint32_t layer = 0; layer < spec.layers; ++layer)
        count += layer_is_dense(spec, layer) ? 0 : 1;
    return count;
}

}  // namespace kvasir::synth
