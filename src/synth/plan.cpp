#include "synth/plan.hpp"

#include <ggml.h>

#include <algorithm>
#include <cmath>

#include "synth/random.hpp"
#include "synth/vocabulary.hpp"

namespace kvasir::synth {
namespace {

constexpr uint32_t kF32 = GGML_TYPE_F32;
constexpr uint32_t kF16 = GGML_TYPE_F16;
constexpr uint32_t kSigmoid = 2;  // llama.cpp's expert_gating_func

// Sizes that a spec does not let one choose.
struct Shape {
    uint32_t heads = 4, heads_kv = 2, head = 64, rope = 64;
    std::vector<int32_t> rope_sections;
    float rope_base = 10000.0F;
    uint32_t context = 4096;
    uint32_t attention_every = 4;                                       // qwen35moe
    uint32_t key_heads = 2, value_heads = 4, state = 64, conv = 4;      // DeltaNet
    uint32_t kv_rank = 128, q_rank = 64, mla_key = 64, mla_value = 64;  // deepseek2
    uint32_t window = 128;                                              // gpt-oss
};

Shape shape_of(const SynthSpec& spec) {
    Shape shape;
    if (spec.arch == "qwen35moe") {
        shape.rope = 32;
        shape.rope_sections = {6, 5, 5, 0};
        // llama.cpp needs at least one layer with full attention.
        shape.attention_every = std::min(4U, spec.layers);
    }
    if (spec.arch == "deepseek2") shape.rope = 32;
    if (spec.preset == Preset::kQwen35_122b) {
        shape = {.heads = 32,
                 .heads_kv = 2,
                 .head = 256,
                 .rope = 64,
                 .rope_sections = {11, 11, 10, 0},
                 .rope_base = 1e7F,
                 .context = 262'144,
                 .attention_every = 4,
                 .key_heads = 16,
                 .value_heads = 64,
                 .state = 128,
                 .conv = 4};
    }
    return shape;
}

class Builder {
public:
    explicit Builder(const SynthSpec& spec) : spec_(spec), shape_(shape_of(spec)) {}

    Plan build() {
        plan_.seed = spec_.seed;
        plan_.splits = spec_.splits;
        plan_.alignment = spec_.alignment;
        plan_.pad_byte = spec_.pad_byte;
        plan_.sparse = spec_.sparse;
        plan_.sync = spec_.sync;
        plan_.direct_blocks = spec_.preset == Preset::kQwen35_122b;
        add_metadata();
        add_vocabulary();
        add_tensors();
        reorder();
        return std::move(plan_);
    }

private:
    // ---- metadata
    void meta(std::string key, MetaValue value) {
        plan_.meta.push_back({std::move(key), std::move(value)});
    }
    void arch_meta(std::string_view key, MetaValue value) {
        meta(spec_.arch + "." + std::string(key), std::move(value));
    }

    void add_metadata() {
        const bool large = spec_.preset == Preset::kQwen35_122b;
        meta("general.architecture", spec_.arch);
        meta("general.type", std::string("model"));
        meta("general.name",
             large ? std::string("Synthetic Qwen3.5-122B-A10B") : "Synthetic tiny " + spec_.arch);
        meta("general.quantization_version", uint32_t{GGML_QNT_VERSION});
        if (large) meta("general.file_type", uint32_t{15});
        arch_meta("block_count", spec_.layers + (spec_.mtp ? 1 : 0));
        if (spec_.mtp) arch_meta("nextn_predict_layers", uint32_t{1});
        arch_meta("context_length", shape_.context);
        arch_meta("embedding_length", spec_.embd);
        arch_meta("feed_forward_length", spec_.ff);
        arch_meta("vocab_size", spec_.vocab);
        arch_meta("attention.layer_norm_rms_epsilon", 1e-6F);
        arch_meta("rope.freq_base", shape_.rope_base);
        arch_meta("rope.dimension_count", shape_.rope);
        if (!shape_.rope_sections.empty()) {
            arch_meta("rope.dimension_sections", shape_.rope_sections);
        }
        add_attention_metadata();
        add_expert_metadata();
    }

    void add_attention_metadata() {
        arch_meta("attention.head_count", shape_.heads);
        if (spec_.arch == "deepseek2") {
            arch_meta("attention.head_count_kv", uint32_t{1});
            arch_meta("attention.key_length", shape_.kv_rank + shape_.rope);
            arch_meta("attention.value_length", shape_.kv_rank);
            arch_meta("attention.key_length_mla", shape_.mla_key);
            arch_meta("attention.value_length_mla", shape_.mla_value);
            arch_meta("attention.kv_lora_rank", shape_.kv_rank);
            arch_meta("attention.q_lora_rank", shape_.q_rank);
            return;
        }
        arch_meta("attention.head_count_kv", shape_.heads_kv);
        arch_meta("attention.key_length", shape_.head);
        arch_meta("attention.value_length", shape_.head);
        if (spec_.arch == "gpt-oss") arch_meta("attention.sliding_window", shape_.window);
        if (spec_.arch != "qwen35moe") return;
        arch_meta("full_attention_interval", shape_.attention_every);
        arch_meta("ssm.conv_kernel", shape_.conv);
        arch_meta("ssm.state_size", shape_.state);
        arch_meta("ssm.group_count", shape_.key_heads);
        arch_meta("ssm.time_step_rank", shape_.value_heads);
        arch_meta("ssm.inner_size", shape_.value_heads * shape_.state);
    }

    void add_expert_metadata() {
        if (moe_layers(spec_) > 0) {
            arch_meta("expert_count", spec_.experts);
            arch_meta("expert_used_count", spec_.used);
        }
        arch_meta("expert_feed_forward_length", spec_.ff);
        const uint32_t shared = shared_experts(spec_);
        if (spec_.arch == "deepseek2") {
            arch_meta("expert_shared_count", shared);
            arch_meta("expert_gating_func", kSigmoid);
            arch_meta("expert_weights_norm", true);
            arch_meta("expert_weights_scale", 1.5F);
        } else if (shared > 0) {
            arch_meta("expert_shared_feed_forward_length", shared * spec_.ff);
        }
        if (spec_.arch == "hy_v3") {
            arch_meta("expert_gating_func", kSigmoid);
            arch_meta("expert_weights_norm", true);
        }
        if (find_architecture(spec_.arch)->dense == DenseRule::kNone) return;
        uint32_t leading = 0;
        while (leading < spec_.layers && layer_is_dense(spec_, leading)) ++leading;
        const int64_t claimed = spec_.dense_key.value_or(leading);
        if (claimed >= 0) arch_meta("leading_dense_block_count", static_cast<uint32_t>(claimed));
    }

    void add_vocabulary() {
        Vocabulary vocabulary = make_vocabulary(spec_.vocab);
        meta("tokenizer.ggml.model", std::string("gpt2"));
        meta("tokenizer.ggml.pre", std::string("qwen35"));
        meta("tokenizer.ggml.tokens", std::move(vocabulary.tokens));
        meta("tokenizer.ggml.token_type", std::move(vocabulary.types));
        meta("tokenizer.ggml.merges", std::move(vocabulary.merges));
        meta("tokenizer.ggml.bos_token_id", vocabulary.end_of_text);
        meta("tokenizer.ggml.eos_token_id", vocabulary.end_of_text);
        meta("tokenizer.ggml.padding_token_id", vocabulary.end_of_text);
        meta("tokenizer.ggml.eot_token_id", vocabulary.end_of_turn);
        meta("tokenizer.ggml.add_bos_token", false);
        meta("tokenizer.chat_template",
             std::string(
                 "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
                 "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"));
    }

    // ---- tensors
    TensorPlan& add(std::string name, uint32_t type, std::initializer_list<uint64_t> ne, Fill fill,
                    float scale) {
        TensorPlan tensor;
        tensor.type = type;
        tensor.dims = static_cast<uint32_t>(ne.size());
        std::copy(ne.begin(), ne.end(), tensor.ne.begin());
        tensor.fill = fill;
        tensor.scale = scale;
        tensor.sources = {{name, tensor.ne[1]}};
        tensor.name = std::move(name);
        plan_.tensors.push_back(std::move(tensor));
        return plan_.tensors.back();
    }
    // A matrix whose product keeps the scale of its input, times `gain`.
    TensorPlan& matrix(std::string name, uint32_t type, std::initializer_list<uint64_t> ne,
                       float gain = 1.0F) {
        const uint64_t row = *ne.begin();
        if (row % static_cast<uint64_t>(ggml_blck_size(static_cast<ggml_type>(type))) != 0)
            type = kF16;
        return add(std::move(name), type, ne, Fill::kGaussian,
                   gain / std::sqrt(static_cast<float>(row)));
    }
    void dense(std::string name, std::initializer_list<uint64_t> ne) {
        matrix(std::move(name), spec_.type_dense, ne);
    }
    void norm(std::string name, uint64_t width) {
        add(std::move(name), kF32, {width}, Fill::kNorm, 0.1F);
    }
    void small(std::string name, std::initializer_list<uint64_t> ne, float scale) {
        add(std::move(name), kF32, ne, Fill::kGaussian, scale);
    }

    void add_tensors() {
        const bool large = spec_.preset == Preset::kQwen35_122b;
        // Unit-scale embeddings, so that the first router already sees the token; peaked logits.
        add("token_embd.weight", large ? uint32_t{GGML_TYPE_Q4_K} : spec_.type_dense,
            {spec_.embd, spec_.vocab}, Fill::kGaussian, 1.0F);
        norm("output_norm.weight", spec_.embd);
        matrix("output.weight", large ? uint32_t{GGML_TYPE_Q6_K} : spec_.type_dense,
               {spec_.embd, spec_.vocab}, 2.0F);
        for (uint32_t layer = 0; layer < spec_.layers + (spec_.mtp ? 1 : 0); ++layer) {
            add_attention(layer);
            if (layer_is_dense(spec_, layer)) {
                add_dense_ffn(layer);
            } else {
                add_router(layer);
                add_experts(layer);
                add_shared(layer);
            }
            if (layer >= spec_.layers) add_nextn(layer);
        }
    }

    static std::string block(uint32_t layer, std::string_view rest) {
        return "blk." + std::to_string(layer) + "." + std::string(rest);
    }

    void add_attention(uint32_t layer) {
        norm(block(layer, "attn_norm.weight"), spec_.embd);
        const bool second = spec_.arch == "qwen35moe" || spec_.arch == "gpt-oss";
        norm(block(layer, second ? "post_attention_norm.weight" : "ffn_norm.weight"), spec_.embd);
        if (spec_.arch == "deepseek2") return add_latent_attention(layer);
        const bool recurrent = spec_.arch == "qwen35moe" && layer < spec_.layers &&
                               (layer + 1) % shape_.attention_every != 0;
        if (recurrent) return add_delta_net(layer);
        // qwen35moe: the query projection carries an output gate of the same width.
        const uint64_t width = uint64_t{shape_.heads} * shape_.head;
        const uint64_t width_kv = uint64_t{shape_.heads_kv} * shape_.head;
        dense(block(layer, "attn_q.weight"),
              {spec_.embd, width * (spec_.arch == "qwen35moe" ? 2 : 1)});
        dense(block(layer, "attn_k.weight"), {spec_.embd, width_kv});
        dense(block(layer, "attn_v.weight"), {spec_.embd, width_kv});
        dense(block(layer, "attn_output.weight"), {width, spec_.embd});
        if (spec_.arch == "gpt-oss") {
            small(block(layer, "attn_q.bias"), {width}, 0.1F);
            small(block(layer, "attn_k.bias"), {width_kv}, 0.1F);
            small(block(layer, "attn_v.bias"), {width_kv}, 0.1F);
            small(block(layer, "attn_output.bias"), {spec_.embd}, 0.1F);
            small(block(layer, "attn_sinks.weight"), {shape_.heads}, 1.0F);
        } else if (spec_.arch != "llama") {
            norm(block(layer, "attn_q_norm.weight"), shape_.head);
            norm(block(layer, "attn_k_norm.weight"), shape_.head);
        }
    }

    void add_latent_attention(uint32_t layer) {
        const uint64_t heads = shape_.heads;
        const uint64_t nope = shape_.mla_key - shape_.rope;
        dense(block(layer, "attn_q_a.weight"), {spec_.embd, shape_.q_rank});
        norm(block(layer, "attn_q_a_norm.weight"), shape_.q_rank);
        dense(block(layer, "attn_q_b.weight"), {shape_.q_rank, heads * shape_.mla_key});
        dense(block(layer, "attn_kv_a_mqa.weight"), {spec_.embd, shape_.kv_rank + shape_.rope});
        norm(block(layer, "attn_kv_a_norm.weight"), shape_.kv_rank);
        dense(block(layer, "attn_k_b.weight"), {nope, shape_.kv_rank, heads});
        dense(block(layer, "attn_v_b.weight"), {shape_.kv_rank, shape_.mla_value, heads});
        dense(block(layer, "attn_output.weight"), {heads * shape_.mla_value, spec_.embd});
    }

    void add_delta_net(uint32_t layer) {
        const uint64_t keys = uint64_t{shape_.key_heads} * shape_.state;
        const uint64_t values = uint64_t{shape_.value_heads} * shape_.state;
        dense(block(layer, "attn_qkv.weight"), {spec_.embd, 2 * keys + values});
        dense(block(layer, "attn_gate.weight"), {spec_.embd, values});
        matrix(block(layer, "ssm_conv1d.weight"), kF32, {shape_.conv, 2 * keys + values});
        add(block(layer, "ssm_dt.bias"), kF32, {shape_.value_heads}, Fill::kStep, 0.5F);
        add(block(layer, "ssm_a"), kF32, {shape_.value_heads}, Fill::kDecay, 1.0F);
        dense(block(layer, "ssm_beta.weight"), {spec_.embd, shape_.value_heads});
        dense(block(layer, "ssm_alpha.weight"), {spec_.embd, shape_.value_heads});
        norm(block(layer, "ssm_norm.weight"), shape_.state);
        dense(block(layer, "ssm_out.weight"), {values, spec_.embd});
    }

    void add_dense_ffn(uint32_t layer) {
        dense(block(layer, "ffn_gate.weight"), {spec_.embd, spec_.ff});
        dense(block(layer, "ffn_up.weight"), {spec_.embd, spec_.ff});
        dense(block(layer, "ffn_down.weight"), {spec_.ff, spec_.embd});
    }

    void add_router(uint32_t layer) {
        // Gain 2: the router's choice varies with the token, and ties do not happen.
        matrix(block(layer, "ffn_gate_inp.weight"), kF32, {spec_.embd, spec_.experts}, 2.0F);
        if (spec_.arch == "deepseek2") {
            small(block(layer, "exp_probs_b.bias"), {spec_.experts}, 0.05F);
        } else if (spec_.arch == "hy_v3") {
            small(block(layer, "exp_probs_b"), {spec_.experts}, 0.05F);
        } else if (spec_.arch == "gpt-oss") {
            small(block(layer, "ffn_gate_inp.bias"), {spec_.experts}, 0.1F);
        }
    }

    void add_experts(uint32_t layer) {
        const uint32_t down_type = spec_.type_down.value_or(spec_.type);
        const std::string gate = block(layer, "ffn_gate_exps.weight");
        const std::string up = block(layer, "ffn_up_exps.weight");
        const bool fused = layer_is_fused(spec_, layer);
        if (fused) {
            TensorPlan& both = matrix(block(layer, "ffn_gate_up_exps.weight"), spec_.type,
                                      {spec_.embd, uint64_t{2} * spec_.ff, spec_.experts});
            both.sources = {{gate, spec_.ff}, {up, spec_.ff}};
            if (spec_.fused_swap) std::swap(both.sources[0], both.sources[1]);
        } else {
            matrix(gate, spec_.type, {spec_.embd, spec_.ff, spec_.experts});
            matrix(up, spec_.type, {spec_.embd, spec_.ff, spec_.experts});
        }
        matrix(block(layer, "ffn_down_exps.weight"), down_type,
               {spec_.ff, spec_.embd, spec_.experts});
        if (find_architecture(spec_.arch)->bias_always) {
            small(block(layer, "ffn_gate_exps.bias"), {spec_.ff, spec_.experts}, 0.2F);
            small(block(layer, "ffn_up_exps.bias"), {spec_.ff, spec_.experts}, 0.2F);
            small(block(layer, "ffn_down_exps.bias"), {spec_.embd, spec_.experts}, 0.2F);
        }
        if (!spec_.scale) return;
        // llama.cpp reads no scale for a fused tensor, only for down beside it.
        for (std::string_view name :
             {"ffn_gate_exps.scale", "ffn_up_exps.scale", "ffn_down_exps.scale"}) {
            if (fused && name != "ffn_down_exps.scale") continue;
            add(block(layer, name), kF32, {spec_.experts}, Fill::kUniform, 1.0F);
        }
    }

    void add_shared(uint32_t layer) {
        const uint64_t width = uint64_t{shared_experts(spec_)} * spec_.ff;
        if (width == 0) return;
        if (spec_.arch == "qwen35moe") {
            add(block(layer, "ffn_gate_inp_shexp.weight"), kF32, {spec_.embd}, Fill::kGaussian,
                1.0F / std::sqrt(static_cast<float>(spec_.embd)));
        }
        dense(block(layer, "ffn_gate_shexp.weight"), {spec_.embd, width});
        dense(block(layer, "ffn_up_shexp.weight"), {spec_.embd, width});
        dense(block(layer, "ffn_down_shexp.weight"), {width, spec_.embd});
    }

    void add_nextn(uint32_t layer) {
        dense(block(layer, "nextn.eh_proj.weight"), {uint64_t{2} * spec_.embd, spec_.embd});
        norm(block(layer, "nextn.enorm.weight"), spec_.embd);
        norm(block(layer, "nextn.hnorm.weight"), spec_.embd);
        norm(block(layer, "nextn.shared_head_norm.weight"), spec_.embd);
    }

    void reorder() {
        auto& tensors = plan_.tensors;
        if (spec_.order == TensorOrder::kReverse) std::reverse(tensors.begin(), tensors.end());
        if (spec_.order != TensorOrder::kShuffle) return;
        Random random(spec_.seed, "tensor order", 0);
        for (size_t i = tensors.size(); i > 1; --i) {
            std::swap(tensors[i - 1], tensors[random.next() % i]);
        }
    }

    const SynthSpec& spec_;
    const Shape shape_;
    Plan plan_;
};

}  // namespace

Result<Plan> make_plan(const SynthSpec& spec) {
    if (auto ok = check_spec(spec); !ok) return tl::unexpected(ok.error());
    Plan plan = Builder(spec).build();
    if (plan.splits > plan.tensors.size()) {
        return fail(Errc::kUsage, "--splits " + std::to_string(plan.splits) +
                                      ": the model has only " +
                                      std::to_string(plan.tensors.size()) + " tensors");
    }
    return plan;
}

}  // namespace kvasir::synth
