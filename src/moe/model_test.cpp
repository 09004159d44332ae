#include "moe/model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>

#include "moe/mapping.hpp"
#include "moe/raw_gguf.hpp"

namespace kvasir::moe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Result<Model> open(const RawGguf& file) {
    const auto bytes = file.file();
    auto header = parse_gguf_header(bytes, bytes.size(), "m.gguf");
    if (!header) return tl::unexpected<Error>(header.error());
    std::vector<GgufHeader> shards;
    shards.push_back(std::move(*header));
    return lay_out_model(std::move(shards));
}

ClassTotal total(const Model& model, TensorClass tensor_class) {
    return model.totals[static_cast<size_t>(tensor_class)];
}

void expect_refused(const RawGguf& file, const std::vector<std::string>& parts,
                    Errc code = Errc::kBadInput) {
    const auto model = open(file);
    ASSERT_FALSE(model) << parts.front();
    EXPECT_EQ(model.error().code, code) << model.error().detail;
    for (const auto& part : parts) EXPECT_THAT(model.error().detail, HasSubstr(part));
}

TEST(Model, LaysOutBanks) {
    const auto model = open(ToyMoe{}.make());
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->arch, "toy");
    EXPECT_EQ(model->name, "Toy");
    EXPECT_EQ(model->n_embd, 64u);
    EXPECT_EQ(model->experts_used, 2u);
    EXPECT_EQ(model->layers_total, 4u);
    EXPECT_EQ(model->experts_total(), 32u);
    EXPECT_THAT(model->warnings, IsEmpty());
    ASSERT_EQ(model->banks.size(), 4u);
    const ExpertBank& bank = model->banks[2];
    EXPECT_EQ(bank.key, (LayerKey{2, 0}));
    EXPECT_EQ(bank.layout_name(), "gate+up+down");
    EXPECT_THAT(bank.global_ids, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
    EXPECT_EQ(bank.expert_bytes(), 3u * 64 * 96 * 4);
    EXPECT_EQ(model->bytes_experts(), 4u * 8 * 3 * 64 * 96 * 4);
    EXPECT_EQ(model->find_bank({4, 0}), nullptr);
    EXPECT_EQ(model->find_bank({2, 1}), nullptr);
    EXPECT_EQ(model->find_bank({2, 0}), &bank);
}

// --- M1: side tensors; every tensor in exactly one class, in any order.

TEST(ModelSideTensors, BiasesAndScalesAreSlabsRouterVectorsAreNot) {
    ToyMoe toy;
    toy.bias = toy.scale = toy.shared = toy.probs = true;
    for (uint32_t seed = 0; seed < 20; ++seed) {
        RawGguf file = toy.make();
        std::shuffle(file.tensors.begin(), file.tensors.end(), std::mt19937(seed));
        const auto model = open(file);
        ASSERT_TRUE(model) << model.error().detail;
        ASSERT_EQ(model->banks.size(), 4u);
        for (const ExpertBank& bank : model->banks) {
            EXPECT_EQ(bank.layout_name(), "gate+up+down+bias+scale");
            ASSERT_EQ(bank.tensors.size(), 9u);
            EXPECT_TRUE(std::ranges::is_sorted(bank.tensors, {}, [](const SlabTensor& tensor) {
                return std::pair(tensor.role, tensor.part);
            }));
            const SlabTensor* bias = bank.find(SlabRole::kDown, SlabPart::kBias);
            EXPECT_EQ(bias->slab_bytes, 64u * 4);
            EXPECT_EQ(bias->n_out, 64u);
            EXPECT_EQ(bank.find(SlabRole::kUp, SlabPart::kScale)->slab_bytes, 4u);
        }
        EXPECT_EQ(total(*model, TensorClass::kExpert).tensors, 36u);
        EXPECT_EQ(total(*model, TensorClass::kRouter).tensors, 8u);
        EXPECT_EQ(total(*model, TensorClass::kSharedExpert).tensors, 4u);
        uint64_t tensors = 0;
        for (const ClassTotal& each : model->totals) tensors += each.tensors;
        EXPECT_EQ(tensors, file.tensors.size());
        uint64_t bytes = 0;
        for (const RawTensor& tensor : file.tensors) bytes += RawGguf::bytes_of(tensor);
        EXPECT_EQ(model->bytes_total(), bytes);
    }
}

TEST(ModelSideTensors, AnInventedTensorWithAnExpertDimensionIsRefused) {
    RawGguf file = ToyMoe{}.make();
    file.add_tensor("blk.1.ffn_novel.weight", {64, 8});
    expect_refused(file, {"blk.1.ffn_novel.weight", "m.gguf", "not guess"});
    RawGguf harmless = ToyMoe{}.make();
    harmless.add_tensor("blk.1.ffn_novel.weight", {64, 5});
    EXPECT_TRUE(open(harmless));
}

TEST(ModelSideTensors, ManyTensors) {
    ToyMoe toy;
    toy.is_moe.assign(250, true);
    toy.bias = true;
    const auto model = open(toy.make());
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->banks.size(), 250u);
    EXPECT_EQ(total(*model, TensorClass::kExpert).tensors, 1500u);
}

// --- M2: layouts.

TEST(ModelLayouts, FusedAndMixed) {
    ToyMoe toy;
    toy.is_fused = {true, false, true, false};
    const auto model = open(toy.make());
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->banks[0].layout_name(), "gate_up+down");
    EXPECT_EQ(model->banks[1].layout_name(), "gate+up+down");
    EXPECT_EQ(model->banks[2].layout_name(), "gate_up+down");
    EXPECT_EQ(model->banks[0].expert_bytes(), model->banks[1].expert_bytes());
    EXPECT_EQ(model->banks[0].find(SlabRole::kGateUp, SlabPart::kWeight)->n_out, 192u);
}

TEST(ModelLayouts, WithoutAGateAndWithASecondBank) {
    RawGguf file = ToyMoe{}.make();
    std::erase_if(file.tensors, [](const RawTensor& tensor) {
        return tensor.name == "blk.0.ffn_gate_exps.weight";
    });
    for (const char* role : {"gate", "up"}) {
        file.add_tensor(std::string("blk.1.ffn_") + role + "_chexps.weight", {64, 32, 4});
    }
    file.add_tensor("blk.1.ffn_down_chexps.weight", {32, 64, 4});
    const auto model = open(file);
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->banks[0].layout_name(), "up+down");
    ASSERT_NE(model->find_bank({1, 1}), nullptr);
    EXPECT_EQ(model->find_bank({1, 1})->experts, 4u);
    EXPECT_EQ(model->experts_total(), 36u);
    EXPECT_THAT(model->warnings, IsEmpty());
}

TEST(ModelLayouts, OneTensorPerExpertIsRefusedByName) {
    RawGguf file = ToyMoe{}.make();
    file.add_tensor("blk.0.ffn_gate.3.weight", {64, 96});
    expect_refused(file, {"blk.0.ffn_gate.3.weight", "one tensor per expert", "convert"},
                   Errc::kUnsupported);
}

TEST(ModelLayouts, ImpossibleBanksAreRefused) {
    const auto without = [](const std::string& name) {
        RawGguf file = ToyMoe{}.make();
        std::erase_if(file.tensors, [&](const RawTensor& tensor) { return tensor.name == name; });
        return file;
    };
    const auto with_shape = [](const std::string& name, std::vector<uint64_t> ne) {
        RawGguf file = ToyMoe{}.make();
        for (RawTensor& tensor : file.tensors) {
            if (tensor.name == name) tensor.ne = ne;
        }
        return file;
    };
    expect_refused(without("blk.2.ffn_down_exps.weight"),
                   {"layer 2", "ffn_down_exps.weight is missing"});
    expect_refused(without("blk.2.ffn_up_exps.weight"),
                   {"layer 2", "ffn_up_exps.weight is missing"});
    RawGguf both = ToyMoe{}.make();
    both.add_tensor("blk.0.ffn_gate_up_exps.weight", {64, 192, 8});
    expect_refused(both, {"layer 0", "beside"});
    RawGguf lone_bias = ToyMoe{}.make();
    lone_bias.add_tensor("blk.0.ffn_gate_up_exps.bias", {192, 8});
    expect_refused(lone_bias, {"ffn_gate_up_exps.bias", "without its weight"});
    RawGguf long_bias = ToyMoe{}.make();
    long_bias.add_tensor("blk.0.ffn_up_exps.bias", {95, 8});
    expect_refused(long_bias, {"ffn_up_exps.bias", "95"});
    expect_refused(with_shape("blk.1.ffn_up_exps.weight", {64, 96, 7}),
                   {"7 experts", "blk.1.ffn_up_exps"});
    expect_refused(with_shape("blk.1.ffn_up_exps.weight", {64, 80, 8}), {"different shapes"});
    expect_refused(with_shape("blk.1.ffn_down_exps.weight", {80, 64, 8}), {"ffn_down_exps", "80"});
    expect_refused(with_shape("blk.1.ffn_down_exps.weight", {96, 64, 8, 2}),
                   {"ffn_down_exps", "dimensions"});
    expect_refused(with_shape("blk.1.ffn_up_exps.weight", {1, 1, 70000}), {"70000 experts"},
                   Errc::kLimit);
    RawGguf odd = ToyMoe{}.keys();
    odd.add_tensor("blk.0.ffn_gate_up_exps.weight", {64, 191, 8});
    odd.add_tensor("blk.0.ffn_down_exps.weight", {95, 64, 8});
    expect_refused(odd, {"191", "halved"});
    RawGguf block_scale = ToyMoe{}.make();
    block_scale.add_tensor("blk.0.ffn_up_exps.scale", {32}, 2);  // Q4_0: one block for all experts
    expect_refused(block_scale, {"ffn_up_exps.scale", "slab"});
}

// --- M3: which layers have experts.

TEST(ModelLayers, DenseMasksFollowTheTensors) {
    for (const std::vector<bool>& mask :
         std::vector<std::vector<bool>>{{false, true, true, true},
                                        {true, false, true, false},
                                        {false, false, false, true},
                                        {true, true, true, true},
                                        {false, false, false, false}}) {
        const auto first = static_cast<uint32_t>(std::ranges::find(mask, true) - mask.begin());
        for (const std::optional<uint32_t> leading :
             {std::optional<uint32_t>(), std::optional(first), std::optional(first + 1)}) {
            ToyMoe toy;
            toy.is_moe = mask;
            toy.leading_dense = leading;
            const auto model = open(toy.make());
            ASSERT_TRUE(model) << model.error().detail;
            std::vector<bool> seen(4, false);
            for (const ExpertBank& bank : model->banks) seen[bank.key.layer] = true;
            EXPECT_EQ(seen, mask);
            if (model->banks.empty()) {
                EXPECT_THAT(model->warnings, ElementsAre(HasSubstr("no layer has experts")));
            } else if (leading == first + 1) {
                EXPECT_THAT(model->warnings, ElementsAre(HasSubstr("leading_dense_block_count")));
            } else {
                EXPECT_THAT(model->warnings, IsEmpty());
            }
        }
    }
}

TEST(ModelLayers, ARouterWithoutExpertsMeansMissingTensors) {
    RawGguf file = ToyMoe{}.make();
    std::erase_if(file.tensors, [](const RawTensor& tensor) {
        return tensor.name.starts_with("blk.3.ffn_") &&
               tensor.name.find("_exps") != std::string::npos;
    });
    expect_refused(file, {"layer 3", "missing"});
}

TEST(ModelLayers, MtpLayersCount) {
    ToyMoe toy;
    toy.mtp = 1;
    const auto model = open(toy.make());
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->layers_total, 5u);
    EXPECT_EQ(model->mtp_layers, 1u);
    ASSERT_EQ(model->banks.size(), 5u);
    EXPECT_FALSE(model->banks[3].is_mtp);
    EXPECT_TRUE(model->banks[4].is_mtp);
    EXPECT_THAT(model->warnings, IsEmpty());
    // The same tensors without the key: the tensors decide, the disagreement is told.
    RawGguf silent = ToyMoe{}.keys();
    silent.tensors = toy.tensors();
    const auto other = open(silent);
    ASSERT_TRUE(other) << other.error().detail;
    EXPECT_TRUE(other->banks[4].is_mtp);
    EXPECT_EQ(other->warnings.size(), 2u);
}

TEST(ModelLayers, MetadataThatDisagreesIsTold) {
    RawGguf file;
    file.add("general.architecture", std::string("toy")).add("toy.block_count", 4u);
    file.add("toy.expert_count", 4u).add("toy.expert_used_count", 9u);
    file.tensors = ToyMoe{}.tensors();
    const auto model = open(file);
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_THAT(model->warnings,
                ElementsAre(HasSubstr("expert_used_count"), HasSubstr("expert_count")));
    expect_refused(RawGguf{}, {"general.architecture"});
}

// --- Slices.

RawGguf slice(const std::vector<uint32_t>& banks, const std::vector<uint32_t>& ids,
              uint32_t version = 1, const std::string& id = std::string(64, 'a')) {
    RawGguf file;
    file.add("general.architecture", std::string("toy")).add("toy.expert_count", 8u);
    file.add("kvasir.version", version).add("kvasir.model_id", id);
    file.add("kvasir.banks", banks).add("kvasir.expert_ids", ids);
    for (const uint32_t layer : {1u, 3u}) {
        const std::string blk = "blk." + std::to_string(layer) + ".ffn_";
        file.add_tensor(blk + "up_exps.weight", {64, 96, layer == 1 ? 2u : 1u});
        file.add_tensor(blk + "down_exps.weight", {96, 64, layer == 1 ? 2u : 1u});
    }
    return file;
}

TEST(ModelSlice, GlobalIdsComeFromTheKeys) {
    const auto model = open(slice({1, 0, 2, 3, 0, 1}, {2, 7, 5}));
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_TRUE(model->is_slice);
    EXPECT_EQ(model->slice_model_id, std::string(64, 'a'));
    EXPECT_THAT(model->find_bank({1, 0})->global_ids, ElementsAre(2, 7));
    EXPECT_THAT(model->find_bank({3, 0})->global_ids, ElementsAre(5));
    EXPECT_THAT(model->warnings, IsEmpty());
}

TEST(ModelSlice, KeysThatDisagreeAreRefused) {
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {7, 2, 5}), {"kvasir.expert_ids", "layer 1"});
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {2, 2, 5}), {"kvasir.expert_ids"});
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {2, 8, 5}), {"kvasir.expert_ids", "8"});
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {2, 7}), {"kvasir.expert_ids"});
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {2, 7, 5, 6}), {"kvasir.expert_ids"});
    expect_refused(slice({1, 0, 2}, {2, 7, 5}), {"kvasir.banks"});
    expect_refused(slice({1, 0, 1, 3, 0, 2}, {2, 7, 5}), {"kvasir.banks", "layer 1"});
    expect_refused(slice({1, 1, 2, 3, 0, 1}, {2, 7, 5}), {"kvasir.banks"});
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {2, 7, 5}, 2), {"kvasir.version"}, Errc::kUnsupported);
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {2, 7, 5}, 1, "abc"), {"kvasir.model_id"});
    expect_refused(slice({1, 0, 2, 3, 0, 1}, {2, 7, 5}, 1, std::string(64, 'G')),
                   {"kvasir.model_id"});
}

// Headers of the toy model of every MoE architecture that llama.cpp's test generator makes (only
// scalar keys kept): all open, each tensor in one class, experts found.
TEST(ModelArchitectures, AllOpen) {
    std::map<std::string, std::string> layouts;
    for (const auto& entry :
         std::filesystem::directory_iterator(KVASIR_SOURCE_DIR "/fuzz/corpus/gguf")) {
        const std::string file = entry.path().filename().string();
        if (!file.starts_with("arch-")) continue;
        SCOPED_TRACE(file);
        std::ifstream in(entry.path(), std::ios::binary);
        const std::vector<uint8_t> bytes(std::istreambuf_iterator<char>(in), {});
        auto header = parse_gguf_header(bytes, uint64_t{1} << 32, file);
        ASSERT_TRUE(header) << header.error().detail;
        const size_t tensors = header->tensors.size();
        std::vector<GgufHeader> shards;
        shards.push_back(std::move(*header));
        const auto model = lay_out_model(std::move(shards));
        ASSERT_TRUE(model) << model.error().detail;
        ASSERT_FALSE(model->banks.empty());
        uint64_t classified = 0;
        for (const ClassTotal& each : model->totals) classified += each.tensors;
        EXPECT_EQ(classified, tensors);
        for (const ExpertBank& bank : model->banks) EXPECT_GE(bank.tensors.size(), 2u);
        layouts[model->arch] = model->banks.back().layout_name();
        EXPECT_EQ(model->banks.back().key.bank, model->arch == "grovemoe" ? 1u : 0u);
    }
    EXPECT_GE(layouts.size(), 50u);
    EXPECT_EQ(layouts["qwen35moe"], "gate_up+down+scale");
    EXPECT_EQ(layouts["gpt-oss"], "gate+up+down+bias+scale");
    EXPECT_EQ(layouts["refact"], "gate+up+down+scale");
}

TEST(Mapping, SlabsOfTheDemoModel) {
    const auto model = open_model(KVASIR_SOURCE_DIR "/models/skald-q4_k_m.gguf");
    ASSERT_TRUE(model) << model.error().detail;
    EXPECT_EQ(model->banks.size(), 8u);
    EXPECT_EQ(model->experts_total(), 256u);
    auto made = Mapping::make(*model);
    ASSERT_TRUE(made) << made.error().detail;
    const Mapping mapping = std::move(*made);
    for (const ExpertBank& bank : model->banks) {
        for (const SlabTensor& tensor : bank.tensors) {
            const auto whole = mapping.tensor(bank, tensor);
            ASSERT_EQ(whole.size(), tensor.slab_bytes * bank.experts);
            for (uint32_t expert = 0; expert < bank.experts; ++expert) {
                const auto slab = mapping.slab(tensor, expert);
                ASSERT_EQ(slab.data(), whole.data() + expert * tensor.slab_bytes);
            }
        }
    }
}

TEST(Mapping, AFileThatShrankIsRefused) {
    const TempFolder folder;
    const auto path = folder.write("m.gguf", ToyMoe{}.make().file());
    const auto model = open_model(path);
    ASSERT_TRUE(model) << model.error().detail;
    std::filesystem::resize_file(path, 1000);
    const auto mapping = Mapping::make(*model);
    ASSERT_FALSE(mapping);
    EXPECT_THAT(mapping.error().detail, HasSubstr(path));
    std::filesystem::remove(path);
    const auto gone = Mapping::make(*model);
    ASSERT_FALSE(gone);
    EXPECT_EQ(gone.error().code, Errc::kEnvironment);
}

TEST(Mapping, TellsWhetherAFileWasWrittenTo) {
    const TempFolder folder;
    const auto bytes = ToyMoe{}.make().file();
    const auto path = folder.write("m.gguf", bytes);
    const auto model = open_model(path);
    ASSERT_TRUE(model) << model.error().detail;
    auto made = Mapping::make(*model);
    ASSERT_TRUE(made) << made.error().detail;
    const Mapping mapping = std::move(*made);
    EXPECT_TRUE(mapping.unchanged());
    // Replaced by renaming, and removed: what is mapped is still the old file.
    std::filesystem::rename(folder.write("other.gguf", {'x'}), path);
    EXPECT_TRUE(mapping.unchanged());
    std::filesystem::remove(path);
    EXPECT_TRUE(mapping.unchanged());

    folder.write("m.gguf", bytes);
    const auto again = Mapping::make(*model);
    ASSERT_TRUE(again) << again.error().detail;
    const auto before = std::filesystem::last_write_time(path);
    std::filesystem::last_write_time(path, before + std::chrono::milliseconds(1));
    const Status written = again->unchanged();
    ASSERT_FALSE(written);
    EXPECT_EQ(written.error().code, Errc::kBadInput);
    EXPECT_THAT(written.error().detail, HasSubstr(path));
    std::filesystem::last_write_time(path, before);
    EXPECT_TRUE(again->unchanged());
    std::filesystem::resize_file(path, bytes.size() + 1);
    EXPECT_FALSE(again->unchanged());
}

}  // namespace
}  // namespace kvasir::moe
