#include "synth/writer.hpp"

#include <ggml.h>
#include <gguf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>

#include "synth/test_files.hpp"

namespace kvasir::synth {
namespace {

// Small and quick, whatever the architecture.
SynthSpec small(const std::string& arch) {
    SynthSpec spec;
    spec.arch = arch;
    spec.embd = 64;
    spec.ff = 32;
    spec.type = GGML_TYPE_Q8_0;
    spec.sync = false;
    return spec;
}

std::string write(const ScratchFolder& folder, const SynthSpec& spec,
                  const std::string& name = "m.gguf") {
    const auto report = write_synth(spec, folder / name);
    EXPECT_TRUE(report) << report.error().detail;
    return report ? report->paths.front() : std::string();
}

TEST(Synth, SameSpecSameBytesAndTheSeedChangesThem) {
    const ScratchFolder folder;
    for (const Architecture& arch : architectures()) {
        SynthSpec spec = small(std::string(arch.name));
        const auto first = read_bytes(write(folder, spec));
        EXPECT_EQ(first, read_bytes(write(folder, spec, "again.gguf"))) << arch.name;
        spec.seed = 2;
        const auto other = read_bytes(write(folder, spec));
        EXPECT_EQ(first.size(), other.size());
        EXPECT_NE(first, other) << arch.name;
    }
}

TEST(Synth, ValuesDoNotDependOnOrderAlignmentOrSplits) {
    const ScratchFolder folder;
    const auto whole = GgufFile(write(folder, small("gpt-oss"))).all();
    for (TensorOrder order : {TensorOrder::kReverse, TensorOrder::kShuffle}) {
        SynthSpec spec = small("gpt-oss");
        spec.order = order;
        spec.alignment = 4096;
        spec.pad_byte = 0xAA;
        const GgufFile file(write(folder, spec, "other.gguf"));
        EXPECT_EQ(file.all(), whole);
        EXPECT_NE(file.names(), GgufFile(folder / "m.gguf").names());
        EXPECT_EQ(file.u32("general.alignment"), 4096);
        for (const std::string& name : file.names())
            EXPECT_EQ(file.offset(name) % 4096, 0u) << name;
    }
}

TEST(Synth, PadByteFillsEveryGapAndNothingElse) {
    const ScratchFolder folder;
    SynthSpec spec = small("llama");
    spec.alignment = 4096;
    const auto plain = read_bytes(write(folder, spec));
    spec.pad_byte = 0x5C;
    const std::string path = write(folder, spec, "padded.gguf");
    const auto padded = read_bytes(path);
    const GgufFile file(path);
    std::vector<bool> used(padded.size(), false);
    std::fill_n(used.begin(), gguf_get_data_offset(file.get()), true);
    for (const std::string& name : file.names()) {
        std::fill_n(used.begin() + static_cast<ptrdiff_t>(file.offset(name)),
                    file.data(name).size(), true);
    }
    ASSERT_EQ(plain.size(), padded.size());
    size_t gaps = 0;
    for (size_t i = 0; i < padded.size(); ++i) {
        if (used[i]) {
            ASSERT_EQ(plain[i], padded[i]) << i;
        } else {
            ++gaps;
            ASSERT_EQ(plain[i], 0) << i;
            ASSERT_EQ(padded[i], 0x5C) << i;
        }
    }
    EXPECT_GT(gaps, 0u);
}

TEST(Synth, SplitsAreCompleteAndScatterALayer) {
    const ScratchFolder folder;
    const auto whole = GgufFile(write(folder, small("hy_v3"))).all();
    for (uint32_t splits : {2U, 3U, 12U}) {
        SynthSpec spec = small("hy_v3");
        spec.splits = splits;
        const auto report = write_synth(spec, folder / ("s" + std::to_string(splits) + ".gguf"));
        ASSERT_TRUE(report) << report.error().detail;
        ASSERT_EQ(report->paths.size(), splits);
        EXPECT_TRUE(report->paths[1].ends_with(
            splits == 12 ? "/s12-00002-of-00012.gguf"
                         : "-00002-of-0000" + std::to_string(splits) + ".gguf"));
        std::map<std::string, std::vector<uint8_t>> joined;
        std::map<std::string, size_t> shard_of;
        for (uint32_t i = 0; i < splits; ++i) {
            const GgufFile file(report->paths[i]);
            ASSERT_TRUE(file.open());
            EXPECT_EQ(gguf_get_val_u16(file.get(), file.key("split.no")), i);
            EXPECT_EQ(gguf_get_val_u16(file.get(), file.key("split.count")), splits);
            EXPECT_EQ(gguf_get_val_i32(file.get(), file.key("split.tensors.count")),
                      static_cast<int32_t>(whole.size()));
            EXPECT_EQ(file.key("general.architecture") >= 0, i == 0);
            for (auto& [name, data] : file.all()) {
                shard_of[name] = i;
                EXPECT_TRUE(joined.emplace(name, data).second) << name;
            }
        }
        EXPECT_EQ(joined, whole);
        if (splits < 3) continue;
        const std::set<size_t> shards = {shard_of["blk.1.ffn_gate_exps.weight"],
                                         shard_of["blk.1.ffn_up_exps.weight"],
                                         shard_of["blk.1.ffn_down_exps.weight"]};
        EXPECT_EQ(shards.size(), 3u);
    }
}

TEST(Synth, FusedHoldsTheRowsOfGateAndUpInOrder) {
    const ScratchFolder folder;
    for (const char* arch : {"qwen35moe", "deepseek2", "hy_v3"}) {
        for (bool swapped : {false, true}) {
            SynthSpec spec = small(arch);
            const GgufFile apart(write(folder, spec));
            spec.fused = "0111";
            spec.fused_swap = swapped;
            const GgufFile fused(write(folder, spec, "fused.gguf"));
            EXPECT_FALSE(fused.has("blk.0.ffn_gate_up_exps.weight"));
            EXPECT_FALSE(fused.has("blk.1.ffn_gate_exps.weight"));
            const auto both = fused.data("blk.1.ffn_gate_up_exps.weight");
            const auto gate = apart.data("blk.1.ffn_gate_exps.weight");
            const auto up = apart.data("blk.1.ffn_up_exps.weight");
            std::vector<uint8_t> expected;
            const auto slab = static_cast<ptrdiff_t>(gate.size() / spec.experts);
            for (ptrdiff_t e = 0; e < spec.experts; ++e) {
                for (const auto* half : {swapped ? &up : &gate, swapped ? &gate : &up}) {
                    expected.insert(expected.end(), half->begin() + e * slab,
                                    half->begin() + (e + 1) * slab);
                }
            }
            EXPECT_EQ(both, expected) << arch << swapped;
        }
    }
}

// Each switch, seen in the file.
struct Switch {
    const char* what;
    const char* arch;
    void (*change)(SynthSpec&);
    bool (*seen)(const GgufFile&);
};

TEST(Synth, EverySwitchChangesWhatItSays) {
    const Switch kSwitches[] = {
        {"layers", "llama", [](SynthSpec& s) { s.layers = 6; },
         [](const GgufFile& f) {
             return f.u32("llama.block_count") == 6 && f.has("blk.5.ffn_gate_inp.weight");
         }},
        {"mtp", "qwen35moe", [](SynthSpec& s) { s.mtp = true; },
         [](const GgufFile& f) {
             return f.u32("qwen35moe.block_count") == 5 &&
                    f.u32("qwen35moe.nextn_predict_layers") == 1 &&
                    f.has("blk.4.nextn.eh_proj.weight") && f.has("blk.4.attn_q.weight") &&
                    f.has("blk.4.ffn_down_exps.weight");
         }},
        {"embd", "qwen3moe", [](SynthSpec& s) { s.embd = 96; },
         [](const GgufFile& f) {
             return f.u32("qwen3moe.embedding_length") == 96 &&
                    f.tensor("blk.0.ffn_up_exps.weight")->ne[0] == 96;
         }},
        {"ff", "qwen3moe", [](SynthSpec& s) { s.ff = 96; },
         [](const GgufFile& f) {
             return f.u32("qwen3moe.expert_feed_forward_length") == 96 &&
                    f.tensor("blk.0.ffn_down_exps.weight")->ne[0] == 96;
         }},
        {"experts", "gpt-oss", [](SynthSpec& s) { s.experts = 5; },
         [](const GgufFile& f) {
             return f.u32("gpt-oss.expert_count") == 5 &&
                    f.tensor("blk.3.ffn_gate_exps.weight")->ne[2] == 5 &&
                    f.tensor("blk.3.ffn_gate_inp.weight")->ne[1] == 5 &&
                    f.tensor("blk.3.ffn_up_exps.bias")->ne[1] == 5;
         }},
        {"used", "llama", [](SynthSpec& s) { s.used = 3; },
         [](const GgufFile& f) { return f.u32("llama.expert_used_count") == 3; }},
        {"vocab", "llama", [](SynthSpec& s) { s.vocab = 777; },
         [](const GgufFile& f) {
             return gguf_get_arr_n(f.get(), f.key("tokenizer.ggml.tokens")) == 777 &&
                    f.tensor("output.weight")->ne[1] == 777;
         }},
        {"shared", "deepseek2", [](SynthSpec& s) { s.shared = 3; },
         [](const GgufFile& f) {
             return f.u32("deepseek2.expert_shared_count") == 3 &&
                    f.tensor("blk.1.ffn_up_shexp.weight")->ne[1] == 96;
         }},
        {"type", "hy_v3", [](SynthSpec& s) { s.type = GGML_TYPE_MXFP4; },
         [](const GgufFile& f) {
             return f.tensor("blk.0.ffn_gate_exps.weight")->type == GGML_TYPE_MXFP4 &&
                    f.tensor("blk.0.ffn_down_exps.weight")->type == GGML_TYPE_MXFP4 &&
                    f.tensor("blk.0.ffn_up_shexp.weight")->type == GGML_TYPE_F16;
         }},
        {"type_down", "hy_v3", [](SynthSpec& s) { s.type_down = GGML_TYPE_Q5_0; },
         [](const GgufFile& f) {
             return f.tensor("blk.0.ffn_gate_exps.weight")->type == GGML_TYPE_Q8_0 &&
                    f.tensor("blk.0.ffn_down_exps.weight")->type == GGML_TYPE_Q5_0;
         }},
        {"type_dense", "hy_v3", [](SynthSpec& s) { s.type_dense = GGML_TYPE_BF16; },
         [](const GgufFile& f) {
             return f.tensor("token_embd.weight")->type == GGML_TYPE_BF16 &&
                    f.tensor("blk.0.attn_q.weight")->type == GGML_TYPE_BF16 &&
                    f.tensor("blk.0.ffn_gate_inp.weight")->type == GGML_TYPE_F32;
         }},
        {"dense", "hy_v3", [](SynthSpec& s) { s.dense = "0101"; },
         [](const GgufFile& f) {
             return f.has("blk.1.ffn_up.weight") && !f.has("blk.1.ffn_up_exps.weight") &&
                    f.has("blk.2.ffn_up_exps.weight") && !f.has("blk.2.ffn_up.weight") &&
                    f.u32("hy_v3.leading_dense_block_count") == 0;
         }},
        {"all dense", "hy_v3", [](SynthSpec& s) { s.dense = "1111"; },
         [](const GgufFile& f) {
             return f.key("hy_v3.expert_count") < 0 && !f.has("blk.0.ffn_gate_inp.weight");
         }},
        {"dense first", "deepseek2", [](SynthSpec& s) { s.dense = "1100"; },
         [](const GgufFile& f) {
             return f.u32("deepseek2.leading_dense_block_count") == 2 &&
                    f.has("blk.1.ffn_up.weight") && f.has("blk.2.exp_probs_b.bias");
         }},
        {"dense key", "hy_v3", [](SynthSpec& s) { s.dense_key = 3; },
         [](const GgufFile& f) { return f.u32("hy_v3.leading_dense_block_count") == 3; }},
        {"no dense key", "hy_v3", [](SynthSpec& s) { s.dense_key = -1; },
         [](const GgufFile& f) { return f.key("hy_v3.leading_dense_block_count") < 0; }},
        {"bias", "gpt-oss", [](SynthSpec& s) { s.bias = true; },
         [](const GgufFile& f) {
             return f.tensor("blk.0.ffn_down_exps.bias")->ne[0] == 64 &&
                    f.has("blk.0.ffn_gate_inp.bias");
         }},
        {"scale", "qwen3moe", [](SynthSpec& s) { s.scale = true; },
         [](const GgufFile& f) {
             return f.tensor("blk.0.ffn_gate_exps.scale")->ne[0] == 8 &&
                    f.has("blk.3.ffn_down_exps.scale");
         }},
        {"fused scale", "qwen35moe",
         [](SynthSpec& s) {
             s.scale = true;
             s.fused = "1111";
         },
         [](const GgufFile& f) {
             return f.has("blk.0.ffn_down_exps.scale") && !f.has("blk.0.ffn_gate_exps.scale");
         }},
    };
    const ScratchFolder folder;
    for (const Switch& test : kSwitches) {
        SynthSpec spec = small(test.arch);
        test.change(spec);
        const GgufFile file(write(folder, spec));
        ASSERT_TRUE(file.open()) << test.what;
        EXPECT_TRUE(test.seen(file)) << test.what;
        if (std::string_view(test.what) == "bias") continue;  // always there in gpt-oss
        EXPECT_FALSE(test.seen(GgufFile(write(folder, small(test.arch), "plain.gguf"))))
            << test.what;
    }
}

TEST(Synth, The122bPresetIsSparseAndHasTheFiguresOfTheRealModel) {
    const ScratchFolder folder;
    SynthSpec spec = qwen35_122b();
    spec.sparse = true;
    const auto start = std::chrono::steady_clock::now();
    const auto report = write_synth(spec, folder / "big.gguf");
    ASSERT_TRUE(report) << report.error().detail;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    struct stat info = {};
    ASSERT_EQ(::stat((folder / "big.gguf").c_str(), &info), 0);
    EXPECT_EQ(static_cast<uint64_t>(info.st_size), report->bytes);
    EXPECT_NEAR(static_cast<double>(info.st_size), 77.2e9, 0.1e9);
    EXPECT_LT(info.st_blocks * 512, 8 << 20);
    EXPECT_EQ(static_cast<uint64_t>(info.st_blocks) * 512, report->bytes_on_disk);

    const GgufFile file(folder / "big.gguf");
    ASSERT_TRUE(file.open());
    uint64_t expert_bytes = 0, expert_tensors = 0, bytes = 0;
    for (int64_t i = 0; i < gguf_get_n_tensors(file.get()); ++i) {
        const std::string name = gguf_get_tensor_name(file.get(), i);
        bytes += gguf_get_tensor_size(file.get(), i);
        if (name.find("_exps.") == std::string::npos) continue;
        ++expert_tensors;
        expert_bytes += gguf_get_tensor_size(file.get(), i);
        EXPECT_EQ(file.tensor(name)->ne[2], 256);
    }
    EXPECT_EQ(expert_tensors, 49u * 3);
    EXPECT_EQ(expert_bytes / (49 * 256), 5'308'416u);
    EXPECT_NEAR(static_cast<double>(expert_bytes) / static_cast<double>(bytes), 0.86, 0.005);
    EXPECT_EQ(file.tensor("blk.3.attn_q.weight")->ne[1], 2 * 32 * 256);
    EXPECT_EQ(file.tensor("blk.0.attn_qkv.weight")->ne[1], 2 * 16 * 128 + 64 * 128);
    EXPECT_EQ(file.tensor("output.weight")->type, GGML_TYPE_Q6_K);
    EXPECT_EQ(file.tensor("token_embd.weight")->type, GGML_TYPE_Q4_K);
    EXPECT_EQ(file.tensor("token_embd.weight")->ne[1], 248'320);
    EXPECT_TRUE(file.has("blk.48.nextn.eh_proj.weight"));
}

TEST(WritePlan, AFullDiskLeavesNothingAndKeepsTheOldFile) {
    const ScratchFolder folder;
    SynthSpec spec = small("llama");
    const auto before = read_bytes(write(folder, spec));
    spec.seed = 2;
    spec.splits = 1;
    rlimit old = {};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
    const rlimit tight = {200'000, old.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
    const auto whole = write_synth(spec, folder / "m.gguf");
    spec.sparse = true;
    spec.embd = 4096;  // the header fits, the hole does not
    const auto sparse = write_synth(spec, folder / "sparse.gguf");
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
    for (const auto* report : {&whole, &sparse}) {
        ASSERT_FALSE(*report);
        EXPECT_EQ(report->error().code, Errc::kNoSpace);
        EXPECT_THAT(report->error().detail, testing::HasSubstr("gguf"));
    }
    EXPECT_EQ(folder.files(), 1u);
    EXPECT_EQ(read_bytes(folder / "m.gguf"), before);
}

TEST(WritePlan, ReplacesOnlyRegularFilesAndSaysWhatIsWrong) {
    const ScratchFolder folder;
    const SynthSpec spec = small("llama");
    const auto folder_given = write_synth(spec, folder.path());
    ASSERT_FALSE(folder_given);
    EXPECT_EQ(folder_given.error().code, Errc::kUsage);
    const auto nowhere = write_synth(spec, folder / "no/such/folder/m.gguf");
    ASSERT_FALSE(nowhere);
    EXPECT_EQ(nowhere.error().code, Errc::kIo);
    EXPECT_THAT(nowhere.error().detail, testing::HasSubstr("no/such/folder"));
    // The second file of a set cannot be made: the first is not left behind.
    SynthSpec split = spec;
    split.splits = 2;
    ASSERT_TRUE(std::filesystem::create_directory(folder / "s-00002-of-00002.gguf"));
    EXPECT_FALSE(write_synth(split, folder / "s.gguf"));
    EXPECT_EQ(folder.files(), 1u);
    SynthSpec many = spec;
    many.splits = 1000;
    const auto too_many = write_synth(many, folder / "many.gguf");
    ASSERT_FALSE(too_many);
    EXPECT_THAT(too_many.error().detail, testing::HasSubstr("--splits 1000"));
}

TEST(WritePlan, TakesAlteredPlansAndRefusesImpossibleOnes) {
    const ScratchFolder folder;
    const auto plan = make_plan(small("llama"));
    ASSERT_TRUE(plan);
    Plan altered = *plan;
    altered.tensors.push_back(altered.tensors.back());
    altered.tensors.back().name = "blk.0.invented_exps.weight";
    altered.meta.push_back({"split.count_like", uint32_t{7}});
    ASSERT_TRUE(write_plan(altered, folder / "altered.gguf"));
    const GgufFile file(folder / "altered.gguf");
    EXPECT_TRUE(file.has("blk.0.invented_exps.weight"));
    EXPECT_EQ(file.u32("split.count_like"), 7);

    const std::pair<const char*, void (*)(Plan&)> kBad[] = {
        {"there twice", [](Plan& p) { p.tensors.push_back(p.tensors[0]); }},
        {"name length", [](Plan& p) { p.tensors[0].name.assign(64, 'x'); }},
        {"no ggml type 4", [](Plan& p) { p.tensors[0].type = 4; }},
        {"no ggml type 4294967295", [](Plan& p) { p.tensors[0].type = ~0U; }},
        {"out of range", [](Plan& p) { p.tensors[0].ne[1] = 0; }},
        {"out of range",
         [](Plan& p) {
             p.tensors[0].ne = {1 << 30, 1 << 30, 1 << 30, 1 << 30};
         }},
        {"do not add up", [](Plan& p) { p.tensors[0].sources.clear(); }},
        {"whole blocks", [](Plan& p) { p.tensors[0].type = GGML_TYPE_Q4_K; }},
        {"number of tensors", [](Plan& p) { p.splits = 0; }},
        {"power of two", [](Plan& p) { p.alignment = 0; }},
        {"there twice", [](Plan& p) { p.meta.push_back(p.meta[0]); }},
    };
    for (const auto& [what, change] : kBad) {
        Plan bad = *plan;
        change(bad);
        const auto report = write_plan(bad, folder / "bad.gguf");
        ASSERT_FALSE(report) << what;
        EXPECT_EQ(report.error().code, Errc::kUsage);
        EXPECT_THAT(report.error().detail, testing::HasSubstr(what));
    }
    EXPECT_EQ(folder.files(), 1u);
}

// Any spec is either written as a file whose size and tensor count are what the header says, or
// refused as usage.
RC_GTEST_PROP(Synth, WritesOrRefuses, ()) {
    SynthSpec spec;
    spec.arch = *rc::gen::elementOf(std::vector<std::string>{"qwen35moe", "qwen3moe", "deepseek2",
                                                             "gpt-oss", "hy_v3", "llama"});
    spec.layers = *rc::gen::inRange(1U, 6U);
    spec.mtp = *rc::gen::inRange(0, 4) == 0;
    spec.embd = 16 * *rc::gen::inRange(0U, 20U);
    spec.ff = 32 * *rc::gen::inRange(1U, 10U);
    spec.experts = *rc::gen::inRange(1U, 20U);
    spec.used = *rc::gen::inRange(1U, 6U);
    spec.type = *rc::gen::elementOf(std::vector<uint32_t>{0, 1, 2, 3, 8, 20, 30, 39, 12, 4, 9, 99});
    spec.scale = *rc::gen::inRange(0, 4) == 0;
    if (*rc::gen::inRange(0, 4) == 0) spec.fused.assign(spec.layers, '1');
    if (*rc::gen::inRange(0, 4) == 0)
        spec.dense = std::string(1, '1') + std::string(spec.layers - 1, '0');
    spec.splits = *rc::gen::inRange(1U, 5U);
    spec.alignment = 1U << *rc::gen::inRange(5, 14);
    spec.sparse = true;
    spec.sync = false;
    const ScratchFolder folder;
    const auto report = write_synth(spec, folder / "p.gguf");
    RC_CLASSIFY(report.has_value(), "written");
    if (!report) {
        RC_ASSERT(report.error().code == Errc::kUsage);
        RC_ASSERT(!report.error().detail.empty());
        RC_ASSERT(folder.files() == 0u);
        return;
    }
    uint64_t tensors = 0;
    for (const std::string& path : report->paths) {
        const GgufFile file(path);
        RC_ASSERT(file.open());
        const int64_t count = gguf_get_n_tensors(file.get());
        tensors += static_cast<uint64_t>(count);
        const uint64_t end = file.offset(gguf_get_tensor_name(file.get(), count - 1)) +
                             gguf_get_tensor_size(file.get(), count - 1);
        RC_ASSERT(std::filesystem::file_size(path) ==
                  (end + spec.alignment - 1) / spec.alignment * spec.alignment);
    }
    RC_ASSERT(tensors == report->tensors);
}

}  // namespace
}  // namespace kvasir::synth
