#include "moe/classify.hpp"

#include <algorithm>
#include <array>
#include <charconv>

namespace kvasir::moe {
namespace {

using enum TensorClass;

struct BaseClass {
    std::string_view base;
    TensorClass tensor_class;
};

// Every tensor base that llama.cpp v0.5.0 names (src/llama-arch.cpp), sorted; the stacked experts
// are parsed by parse_expert_name().
constexpr BaseClass kBases[] = {
    {"altup_correct_coef", kOther},
    {"altup_correct_scale", kOther},
    {"altup_predict_coef", kOther},
    {"altup_proj", kOther},
    {"altup_router", kOther},
    {"altup_router_norm", kNorm},
    {"altup_unembd_proj", kOutput},
    {"attn_compressor_ape", kAttention},
    {"attn_compressor_gate", kAttention},
    {"attn_compressor_kv", kAttention},
    {"attn_compressor_norm", kAttention},
    {"attn_conv_base", kAttention},
    {"attn_conv_proj", kAttention},
    {"attn_gate", kAttention},
    {"attn_k", kAttention},
    {"attn_k_b", kAttention},
    {"attn_k_norm", kAttention},
    {"attn_kv", kAttention},
    {"attn_kv_a_mqa", kAttention},
    {"attn_kv_a_norm", kAttention},
    {"attn_kv_b", kAttention},
    {"attn_norm", kNorm},
    {"attn_norm_2", kNorm},
    {"attn_o", kAttention},
    {"attn_output", kAttention},
    {"attn_output_a", kAttention},
    {"attn_output_b", kAttention},
    {"attn_output_norm", kNorm},
    {"attn_q", kAttention},
    {"attn_q_a", kAttention},
    {"attn_q_a_norm", kAttention},
    {"attn_q_b", kAttention},
    {"attn_q_norm", kAttention},
    {"attn_qkv", kAttention},
    {"attn_rel_b", kAttention},
    {"attn_res_score", kOther},
    {"attn_rot_embd", kAttention},
    {"attn_sinks", kAttention},
    {"attn_sub_norm", kNorm},
    {"attn_v", kAttention},
    {"attn_v_b", kAttention},
    {"channel_mix_key", kRecurrent},
    {"channel_mix_lerp_k", kRecurrent},
    {"channel_mix_lerp_r", kRecurrent},
    {"channel_mix_receptance", kRecurrent},
    {"channel_mix_value", kRecurrent},
    {"cls", kOutput},
    {"cls.norm", kNorm},
    {"cls.output", kOutput},
    {"conf_proj", kOther},
    {"conv1d", kOther},
    {"cross_attn_k", kAttention},
    {"cross_attn_norm", kNorm},
    {"cross_attn_o", kAttention},
    {"cross_attn_q", kAttention},
    {"cross_attn_rel_b", kAttention},
    {"cross_attn_v", kAttention},
    {"d2t", kOther},
    {"dec.output_norm", kNorm},
    {"dense_2", kOutput},
    {"dense_3", kOutput},
    {"enc.output_norm", kNorm},
    {"exp_probs_b", kRouter},
    {"exp_probs_b_vl", kRouter},
    {"fc", kOther},
    {"ffn.act", kDenseFfn},
    {"ffn_conv_base", kOther},
    {"ffn_conv_proj", kOther},
    {"ffn_down", kDenseFfn},
    {"ffn_down_shexp", kSharedExpert},
    {"ffn_gate", kDenseFfn},
    {"ffn_gate_inp", kRouter},
    {"ffn_gate_inp_shexp", kRouter},
    {"ffn_gate_shexp", kSharedExpert},
    {"ffn_gate_tid2eid", kRouter},
    {"ffn_latent_down", kDenseFfn},
    {"ffn_latent_up", kDenseFfn},
    {"ffn_norm", kNorm},
    {"ffn_norm_exps", kNorm},
    {"ffn_res_score", kOther},
    {"ffn_routed_down", kDenseFfn},
    {"ffn_routed_norm", kNorm},
    {"ffn_routed_up", kDenseFfn},
    {"ffn_sub_norm", kNorm},
    {"ffn_up", kDenseFfn},
    {"ffn_up_shexp", kSharedExpert},
    {"hc_attn_base", kOther},
    {"hc_attn_down", kOther},
    {"hc_attn_fn", kOther},
    {"hc_attn_inject", kOther},
    {"hc_attn_norm", kNorm},
    {"hc_attn_scale", kOther},
    {"hc_attn_up", kOther},
    {"hc_ffn_base", kOther},
    {"hc_ffn_down", kOther},
    {"hc_ffn_fn", kOther},
    {"hc_ffn_inject", kOther},
    {"hc_ffn_norm", kNorm},
    {"hc_ffn_scale", kOther},
    {"hc_ffn_up", kOther},
    {"hrm.z_l_init", kOther},
    {"indexer.attn_k", kAttention},
    {"indexer.attn_q_b", kAttention},
    {"indexer.k_norm", kAttention},
    {"indexer.k_proj", kAttention},
    {"indexer.proj", kAttention},
    {"indexer.q_norm", kAttention},
    {"indexer.q_proj", kAttention},
    {"indexer_compressor_ape", kAttention},
    {"indexer_compressor_gate", kAttention},
    {"indexer_compressor_kv", kAttention},
    {"indexer_compressor_norm", kAttention},
    {"inp_gate", kOther},
    {"laurel_l", kOther},
    {"laurel_post_norm", kNorm},
    {"laurel_r", kOther},
    {"layer_output_norm", kNorm},
    {"layer_output_scale", kOther},
    {"markov_w1", kOther},
    {"markov_w2", kOther},
    {"masked_embd_centroids", kOther},
    {"masked_embd_ordering", kOther},
    {"nextn.eh_proj", kOther},
    {"nextn.embed_tokens", kOther},
    {"nextn.enorm", kOther},
    {"nextn.hnorm", kOther},
    {"nextn.post_projection", kOther},
    {"nextn.pre_projection", kOther},
    {"nextn.shared_head_head", kOther},
    {"nextn.shared_head_norm", kOther},
    {"output", kOutput},
    {"output_hc_base", kOther},
    {"output_hc_down", kOther},
    {"output_hc_fn", kOther},
    {"output_hc_norm", kNorm},
    {"output_hc_scale", kOther},
    {"output_hc_up", kOther},
    {"output_norm", kNorm},
    {"output_res_score", kOther},
    {"per_layer_model_proj", kOther},
    {"per_layer_proj_norm", kNorm},
    {"per_layer_token_embd", kEmbedding},
    {"ple_conv1d", kOther},
    {"ple_key", kOther},
    {"ple_norm_conv", kNorm},
    {"ple_norm_key", kNorm},
    {"ple_norm_query", kNorm},
    {"ple_value", kOther},
    {"position_embd", kEmbedding},
    {"post_attention_norm", kNorm},
    {"post_ffw_norm", kNorm},
    {"post_ffw_norm_1", kNorm},
    {"post_ffw_norm_2", kNorm},
    {"post_norm", kNorm},
    {"pre_ffw_norm_2", kNorm},
    {"proj", kOther},
    {"rope_factors_long", kOther},
    {"rope_factors_short", kOther},
    {"rope_freqs", kOther},
    {"selector_hidden", kOther},
    {"selector_predecessor", kOther},
    {"selector_successor", kOther},
    {"shortconv.conv", kRecurrent},
    {"shortconv.in_proj", kRecurrent},
    {"shortconv.out_proj", kRecurrent},
    {"ssm_a", kRecurrent},
    {"ssm_alpha", kRecurrent},
    {"ssm_b_norm", kRecurrent},
    {"ssm_ba", kRecurrent},
    {"ssm_beta", kRecurrent},
    {"ssm_c_norm", kRecurrent},
    {"ssm_conv1d", kRecurrent},
    {"ssm_conv1d_k", kRecurrent},
    {"ssm_conv1d_q", kRecurrent},
    {"ssm_conv1d_v", kRecurrent},
    {"ssm_d", kRecurrent},
    {"ssm_dt", kRecurrent},
    {"ssm_dt_norm", kRecurrent},
    {"ssm_f_a", kRecurrent},
    {"ssm_f_b", kRecurrent},
    {"ssm_g", kRecurrent},
    {"ssm_g_a", kRecurrent},
    {"ssm_g_b", kRecurrent},
    {"ssm_in", kRecurrent},
    {"ssm_norm", kRecurrent},
    {"ssm_out", kRecurrent},
    {"ssm_x", kRecurrent},
    {"time_mix_a0", kRecurrent},
    {"time_mix_a1", kRecurrent},
    {"time_mix_a2", kRecurrent},
    {"time_mix_decay", kRecurrent},
    {"time_mix_decay_w1", kRecurrent},
    {"time_mix_decay_w2", kRecurrent},
    {"time_mix_first", kRecurrent},
    {"time_mix_g1", kRecurrent},
    {"time_mix_g2", kRecurrent},
    {"time_mix_gate", kRecurrent},
    {"time_mix_k_a", kRecurrent},
    {"time_mix_k_k", kRecurrent},
    {"time_mix_key", kRecurrent},
    {"time_mix_lerp_fused", kRecurrent},
    {"time_mix_lerp_g", kRecurrent},
    {"time_mix_lerp_k", kRecurrent},
    {"time_mix_lerp_r", kRecurrent},
    {"time_mix_lerp_v", kRecurrent},
    {"time_mix_lerp_w", kRecurrent},
    {"time_mix_lerp_x", kRecurrent},
    {"time_mix_ln", kRecurrent},
    {"time_mix_output", kRecurrent},
    {"time_mix_r_k", kRecurrent},
    {"time_mix_receptance", kRecurrent},
    {"time_mix_v0", kRecurrent},
    {"time_mix_v1", kRecurrent},
    {"time_mix_v2", kRecurrent},
    {"time_mix_value", kRecurrent},
    {"time_mix_w0", kRecurrent},
    {"time_mix_w1", kRecurrent},
    {"time_mix_w2", kRecurrent},
    {"token_embd", kEmbedding},
    {"token_embd_norm", kNorm},
    {"token_types", kEmbedding},
    {"vis_attn_output", kAttention},
    {"vis_attn_qkv", kAttention},
    {"vis_down", kDenseFfn},
    {"vis_gate", kDenseFfn},
    {"vis_up", kDenseFfn},
};
static_assert(std::ranges::is_sorted(kBases, {}, &BaseClass::base));

constexpr std::array<std::string_view, 7> kSuffixes = {
    "weight", "bias", "scale", "scales", "input_scale", "lora_a", "lora_b",
};

bool take_prefix(std::string_view& text, std::string_view prefix) {
    if (!text.starts_with(prefix)) return false;
    text.remove_prefix(prefix.size());
    return true;
}

// A number without sign or leading zeros, so that two spellings cannot mean the same layer.
std::optional<uint32_t> take_number(std::string_view& text) {
    uint32_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || (text[0] == '0' && end != text.data() + 1)) return std::nullopt;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return value;
}

std::optional<TensorClass> class_of_base(std::string_view base) {
    if (base.starts_with("convnext.") || base.starts_with("posnet.")) return kOther;
    const auto found = std::ranges::lower_bound(kBases, base, {}, &BaseClass::base);
    if (found == std::end(kBases) || found->base != base) return std::nullopt;
    return found->tensor_class;
}

bool has_expert_dimension(const GgufTensor& tensor, uint64_t n_expert) {
    return n_expert > 1 && tensor.ne[tensor.dims - 1] == n_expert;
}

bool mentions_experts(std::string_view name) {
    for (const std::string_view word : {"exps", "_exp.", "expert"}) {
        if (name.find(word) != std::string_view::npos) return true;
    }
    return false;
}

}  // namespace

TensorName parse_tensor_name(std::string_view name) {
    TensorName out;
    std::string_view rest = name;
    if (!take_prefix(rest, "enc.blk.") && !take_prefix(rest, "dec.blk.")) take_prefix(rest, "blk.");
    if (rest.size() != name.size()) {
        out.layer = take_number(rest);
        if (!out.layer || *out.layer >= kLayersMax || !take_prefix(rest, ".")) {
            out.layer.reset();
            rest = name;
        }
    }
    out.base = rest;
    const size_t dot = rest.rfind('.');
    if (dot != std::string_view::npos && dot > 0 &&
        std::ranges::find(kSuffixes, rest.substr(dot + 1)) != kSuffixes.end()) {
        out.base = rest.substr(0, dot);
        out.suffix = rest.substr(dot + 1);
    }
    return out;
}

std::optional<ExpertTensorName> parse_expert_name(std::string_view name) {
    if (!name.starts_with("blk.")) return std::nullopt;
    const TensorName parsed = parse_tensor_name(name);
    if (!parsed.layer) return std::nullopt;
    std::string_view rest = parsed.base;
    if (!take_prefix(rest, "ffn_")) return std::nullopt;
    ExpertTensorName out;
    if (take_prefix(rest, "gate_up_")) {
        out.role = SlabRole::kGateUp;
    } else if (take_prefix(rest, "gate_")) {
        out.role = SlabRole::kGate;
    } else if (take_prefix(rest, "up_")) {
        out.role = SlabRole::kUp;
    } else if (take_prefix(rest, "down_")) {
        out.role = SlabRole::kDown;
    } else {
        return std::nullopt;
    }
    if (rest != "exps" && rest != "chexps") return std::nullopt;
    out.key = {*parsed.layer, rest == "exps" ? 0u : 1u};
    if (parsed.suffix == "weight") {
        out.part = SlabPart::kWeight;
    } else if (parsed.suffix == "bias") {
        out.part = SlabPart::kBias;
    } else if (parsed.suffix == "scale") {
        out.part = SlabPart::kScale;
    } else {
        return std::nullopt;
    }
    return out;
}

bool is_one_tensor_per_expert(std::string_view name) {
    std::string_view rest = parse_tensor_name(name).base;
    if (!take_prefix(rest, "ffn_gate.") && !take_prefix(rest, "ffn_up.") &&
        !take_prefix(rest, "ffn_down.")) {
        return false;
    }
    return take_number(rest) && rest.empty();
}

bool has_expert_shape(const GgufTensor& tensor, SlabPart part) {
    const auto& ne = tensor.ne;
    switch (part) {
        case SlabPart::kWeight:
            return ne[3] == 1;
        case SlabPart::kBias:
            return ne[2] == 1 && ne[3] == 1;
        case SlabPart::kScale:
            return ne[1] == 1 && ne[2] == 1 && ne[3] == 1;
    }
    return false;
}

uint64_t expert_count(const GgufTensor& tensor, SlabPart part) {
    switch (part) {
        case SlabPart::kWeight:
            return tensor.ne[2];
        case SlabPart::kBias:
            return tensor.ne[1];
        case SlabPart::kScale:
            return tensor.ne[0];
    }
    return 0;
}

std::optional<TensorClass> classify_tensor(const GgufTensor& tensor, uint64_t n_expert) {
    if (is_one_tensor_per_expert(tensor.name)) return std::nullopt;
    if (const auto expert = parse_expert_name(tensor.name)) {
        if (!has_expert_shape(tensor, expert->part)) return std::nullopt;
        return kExpert;
    }
    const TensorName name = parse_tensor_name(tensor.name);
    if (const auto known = class_of_base(name.base)) {
        // A stack of matrices under a dense name is not a dense tensor.
        const bool is_ffn = *known == kDenseFfn || *known == kSharedExpert;
        const bool is_stack = tensor.ne[2] > 1 && has_expert_dimension(tensor, n_expert);
        if (is_ffn && is_stack && name.suffix == "weight") return std::nullopt;
        return *known;
    }
    if (name.suffix == "input_scale" && name.base.starts_with("ffn_") &&
        (name.base.ends_with("_exps") || name.base.ends_with("_chexps"))) {
        return has_expert_shape(tensor, SlabPart::kScale) ? std::optional(kRouter) : std::nullopt;
    }
    if (mentions_experts(tensor.name) || has_expert_dimension(tensor, n_expert))
        return std::nullopt;
    return kOther;
}

}  // namespace kvasir::moe
