#include "moe/classify.hpp"

#include <gtest/gtest.h>

namespace kvasir::moe {
namespace {

using enum TensorClass;

GgufTensor tensor(std::string name, std::vector<uint64_t> ne) {
    GgufTensor out;
    out.name = std::move(name);
    out.dims = static_cast<uint32_t>(ne.size());
    for (size_t i = 0; i < ne.size(); ++i) out.ne[i] = ne[i];
    return out;
}

TEST(Classify, ParsesNames) {
    const auto expect = [](const char* name, std::optional<uint32_t> layer, const char* base,
                           const char* suffix) {
        const TensorName parsed = parse_tensor_name(name);
        EXPECT_EQ(parsed.layer, layer) << name;
        EXPECT_EQ(parsed.base, base) << name;
        EXPECT_EQ(parsed.suffix, suffix) << name;
    };
    expect("blk.12.attn_q.weight", 12, "attn_q", "weight");
    expect("enc.blk.0.attn_o.weight", 0, "attn_o", "weight");
    expect("dec.blk.7.cross_attn_q.weight", 7, "cross_attn_q", "weight");
    expect("blk.3.nextn.eh_proj.weight", 3, "nextn.eh_proj", "weight");
    expect("blk.3.ssm_a", 3, "ssm_a", "");
    expect("blk.3.ffn.act.scales", 3, "ffn.act", "scales");
    expect("token_embd.weight", std::nullopt, "token_embd", "weight");
    expect("cls.output.bias", std::nullopt, "cls.output", "bias");
    // Two spellings of one layer would make two banks of it.
    expect("blk.03.ssm_a", std::nullopt, "blk.03.ssm_a", "");
    expect("blk.4294967296.ssm_a", std::nullopt, "blk.4294967296.ssm_a", "");
    expect("blk.65536.ssm_a", std::nullopt, "blk.65536.ssm_a", "");
    expect("blk.-1.ssm_a", std::nullopt, "blk.-1.ssm_a", "");
    expect("blk..ssm_a", std::nullopt, "blk..ssm_a", "");
    expect("blk.5", std::nullopt, "blk.5", "");
    expect("", std::nullopt, "", "");
}

TEST(Classify, ParsesExpertNames) {
    for (const SlabRole role :
         {SlabRole::kGate, SlabRole::kUp, SlabRole::kDown, SlabRole::kGateUp}) {
        for (const SlabPart part : {SlabPart::kWeight, SlabPart::kBias, SlabPart::kScale}) {
            for (const uint32_t bank : {0u, 1u}) {
                const std::string name = "blk.9.ffn_" + std::string(to_string(role)) +
                                         (bank == 0 ? "_exps." : "_chexps.") +
                                         std::string(to_string(part));
                const auto parsed = parse_expert_name(name);
                ASSERT_TRUE(parsed) << name;
                EXPECT_EQ(parsed->key, (LayerKey{9, bank}));
                EXPECT_EQ(parsed->role, role);
                EXPECT_EQ(parsed->part, part);
            }
        }
    }
    for (const char* name :
         {"blk.9.ffn_gate_exps", "blk.9.ffn_gate_exps.input_scale", "blk.9.ffn_norm_exps.weight",
          "blk.9.ffn_gate.weight", "blk.9.ffn_gate_shexp.weight", "blk.9.ffn_gate_inp.weight",
          "ffn_gate_exps.weight", "enc.blk.9.ffn_gate_exps.weight",
          "blk.9.ffn_gate_exps.weight.weight", "blk.09.ffn_gate_exps.weight"}) {
        EXPECT_FALSE(parse_expert_name(name)) << name;
    }
}

struct Case {
    const char* name;
    std::vector<uint64_t> ne;
    std::optional<TensorClass> tensor_class;
};

// Eight experts; n_embd and head counts are 8 as well where that could confuse.
const std::vector<Case> kCases = {
    {"token_embd.weight", {64, 8}, kEmbedding},
    {"per_layer_token_embd.weight", {64, 8}, kEmbedding},
    {"position_embd.weight", {64, 8}, kEmbedding},
    {"output.weight", {64, 8}, kOutput},
    {"cls.output.weight", {8}, kOutput},
    {"output_norm.weight", {8}, kNorm},
    {"token_embd_norm.weight", {8}, kNorm},
    {"rope_freqs.weight", {8}, kOther},
    {"blk.0.attn_norm.weight", {8}, kNorm},
    {"blk.0.attn_q.weight", {8, 8}, kAttention},
    {"blk.0.attn_q.lora_a", {8, 4, 8}, kAttention},
    {"blk.0.attn_k_b.weight", {16, 32, 8}, kAttention},
    {"blk.0.attn_sinks.weight", {8}, kAttention},
    {"blk.0.attn_q_norm.weight", {8}, kAttention},
    {"blk.0.indexer.k_norm.bias", {8}, kAttention},
    {"blk.0.ssm_a", {1, 8}, kRecurrent},
    {"blk.0.ssm_conv1d_q.weight", {4, 1, 8}, kRecurrent},
    {"blk.0.shortconv.conv.weight", {3, 8}, kRecurrent},
    {"blk.0.time_mix_w1.weight", {8, 8}, kRecurrent},
    {"blk.0.ffn_norm_exps.weight", {64}, kNorm},
    {"blk.0.ffn_gate_inp.weight", {64, 8}, kRouter},
    {"blk.0.ffn_gate_inp.bias", {8}, kRouter},
    {"blk.0.ffn_gate_inp.scale", {64}, kRouter},
    {"blk.0.ffn_gate_inp_shexp.weight", {64}, kRouter},
    {"blk.0.exp_probs_b", {8}, kRouter},
    {"blk.0.exp_probs_b.bias", {8}, kRouter},
    {"blk.0.exp_probs_b_vl.bias", {8}, kRouter},
    {"blk.0.ffn_gate_tid2eid.weight", {2, 100}, kRouter},
    {"blk.0.ffn_gate_exps.input_scale", {8}, kRouter},
    {"blk.0.ffn_gate_exps.input_scale", {8, 8}, std::nullopt},
    {"blk.0.ffn_up_shexp.weight", {64, 96}, kSharedExpert},
    {"blk.0.ffn_down_shexp.scale", {1}, kSharedExpert},
    {"blk.0.ffn_up_shexp.weight", {64, 96, 8}, std::nullopt},
    {"blk.0.ffn_up.weight", {64, 8}, kDenseFfn},
    {"blk.0.ffn_up.weight", {64, 96, 8}, std::nullopt},
    {"blk.0.ffn_up.lora_b", {4, 96, 8}, kDenseFfn},
    {"blk.0.ffn_latent_down.weight", {64, 32}, kDenseFfn},
    {"blk.0.vis_gate.weight", {64, 8}, kDenseFfn},
    {"blk.0.nextn.eh_proj.weight", {128, 64}, kOther},
    {"convnext.3.pw1.weight", {64, 8}, kOther},
    {"posnet.0.attn_q.weight", {64, 8}, kOther},
    {"blk.0.ffn_gate_exps.weight", {64, 96, 8}, kExpert},
    {"blk.0.ffn_gate_exps.weight", {64, 96}, kExpert},  // one local expert, dimension dropped
    {"blk.0.ffn_gate_exps.weight", {64, 96, 8, 2}, std::nullopt},
    {"blk.0.ffn_gate_exps.bias", {96, 8}, kExpert},
    {"blk.0.ffn_gate_exps.bias", {96, 8, 2}, std::nullopt},
    {"blk.0.ffn_gate_exps.scale", {8}, kExpert},
    {"blk.0.ffn_gate_exps.scale", {8, 8}, std::nullopt},
    {"blk.0.ffn_up_chexps.weight", {64, 96, 4}, kExpert},
    {"blk.0.ffn_gate_exps", {64, 96, 8}, std::nullopt},
    {"blk.0.ffn_gate_exps.weight2", {64, 96, 8}, std::nullopt},
    {"blk.0.ffn_mix_exps.weight", {64, 96, 8}, std::nullopt},
    {"blk.0.ffn_gate.3.weight", {64, 96}, std::nullopt},
    {"blk.0.expert_gain.weight", {64}, std::nullopt},
    {"blk.0.invented.weight", {64, 8}, std::nullopt},
    {"blk.0.invented.weight", {8}, std::nullopt},
    {"blk.0.invented.weight", {64, 7}, kOther},
    {"mm.0.weight", {64, 64}, kOther},
};

TEST(Classify, EveryKindByNameSuffixAndShape) {
    for (const Case& item : kCases) {
        EXPECT_EQ(classify_tensor(tensor(item.name, item.ne), 8), item.tensor_class) << item.name;
    }
}

TEST(Classify, WithoutExpertsNoDimensionIsAnExpertDimension) {
    EXPECT_EQ(classify_tensor(tensor("blk.0.invented.weight", {64, 8}), 0), kOther);
    EXPECT_EQ(classify_tensor(tensor("blk.0.invented.weight", {64, 1}), 1), kOther);
    EXPECT_EQ(classify_tensor(tensor("blk.0.ffn_up.weight", {64, 96, 8}), 0), kDenseFfn);
}

TEST(Classify, OldLayoutByName) {
    EXPECT_TRUE(is_one_tensor_per_expert("blk.0.ffn_gate.3.weight"));
    EXPECT_TRUE(is_one_tensor_per_expert("blk.0.ffn_down.11.bias"));
    EXPECT_FALSE(is_one_tensor_per_expert("blk.0.ffn_gate.weight"));
    EXPECT_FALSE(is_one_tensor_per_expert("blk.0.ffn_gate.x.weight"));
    EXPECT_FALSE(is_one_tensor_per_expert("blk.0.ffn.act.scales"));
}

}  // namespace
}  // namespace kvasir::moe
