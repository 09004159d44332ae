#include "synth/spec.hpp"

#include <ggml.h>
#include <gtest/gtest.h>

#include <set>

#include "synth/plan.hpp"
#include "synth/vocabulary.hpp"

namespace kvasir::synth {
namespace {

TEST(Spec, DefaultsOfEveryArchitectureAreAccepted) {
    for (const Architecture& arch : architectures()) {
        SynthSpec spec;
        spec.arch = arch.name;
        const auto ok = check_spec(spec);
        EXPECT_TRUE(ok) << arch.name << ": " << ok.error().detail;
    }
    EXPECT_TRUE(check_spec(qwen35_122b()));
    EXPECT_TRUE(check_spec(qwen35_122b(4, false)));
}

struct Refused {
    const char* what;  // must be in the sentence
    void (*change)(SynthSpec&);
};

TEST(Spec, RefusesWithOneSentenceThatNamesTheSwitch) {
    const Refused kRefused[] = {
        {"no architecture 'gpt-?'", [](SynthSpec& s) { s.arch = "gpt-\n"; }},
        {"--layers is 0",
         [](SynthSpec& s) {
             s.arch = "llama";
             s.layers = 0;
         }},
        {"--layers is 1", [](SynthSpec& s) { s.layers = 1; }},
        {"--layers is 512", [](SynthSpec& s) { s.layers = 512; }},
        {"--layers is 4294967295", [](SynthSpec& s) { s.layers = ~0U; }},
        {"--experts is 0", [](SynthSpec& s) { s.experts = 0; }},
        {"--experts is 1025", [](SynthSpec& s) { s.experts = 1025; }},
        {"--used is 9", [](SynthSpec& s) { s.used = 9; }},
        {"--used is 0", [](SynthSpec& s) { s.used = 0; }},
        {"--vocab", [](SynthSpec& s) { s.vocab = 287; }},
        {"--vocab", [](SynthSpec& s) { s.vocab = 1'000'001; }},
        {"--splits", [](SynthSpec& s) { s.splits = 0; }},
        {"--splits", [](SynthSpec& s) { s.splits = 1025; }},
        {"--alignment", [](SynthSpec& s) { s.alignment = 16; }},
        {"not a power of two", [](SynthSpec& s) { s.alignment = 48; }},
        {"--embd is 0", [](SynthSpec& s) { s.embd = 0; }},
        {"--embd is 250", [](SynthSpec& s) { s.embd = 250; }},
        {"--ff is 65552", [](SynthSpec& s) { s.ff = 65552; }},
        {"--type q4_K needs rows of a multiple of 256, but --embd is 96",
         [](SynthSpec& s) { s.embd = 96; }},
        {"--type q4_K needs rows of a multiple of 256, but --ff", [](SynthSpec& s) { s.ff = 96; }},
        {"--type-down q6_K",
         [](SynthSpec& s) {
             s.ff = 64;
             s.type = GGML_TYPE_Q8_0;
             s.type_down = GGML_TYPE_Q6_K;
         }},
        {"ggml type 9 ", [](SynthSpec& s) { s.type = GGML_TYPE_Q8_1; }},
        {"ggml type 4 ", [](SynthSpec& s) { s.type_dense = 4; }},
        {"ggml type 4294967295 ", [](SynthSpec& s) { s.type_down = ~0U; }},
        {"--fused:",
         [](SynthSpec& s) {
             s.arch = "qwen3moe";
             s.fused = "1111";
         }},
        {"--fused-mask", [](SynthSpec& s) { s.fused = "11"; }},
        {"--fused-swap", [](SynthSpec& s) { s.fused_swap = true; }},
        {"--bias", [](SynthSpec& s) { s.bias = true; }},
        {"--scale",
         [](SynthSpec& s) {
             s.arch = "deepseek2";
             s.scale = true;
         }},
        {"--mtp",
         [](SynthSpec& s) {
             s.arch = "gpt-oss";
             s.mtp = true;
         }},
        {"--scale does not go with --mtp",
         [](SynthSpec& s) {
             s.mtp = true;
             s.scale = true;
         }},
        {"--shared 1",
         [](SynthSpec& s) {
             s.arch = "qwen3moe";
             s.shared = 1;
         }},
        {"--shared 0", [](SynthSpec& s) { s.shared = 0; }},
        {"--dense-first", [](SynthSpec& s) { s.dense = "1000"; }},
        {"--dense-mask 0100",
         [](SynthSpec& s) {
             s.arch = "deepseek2";
             s.dense = "0100";
         }},
        {"--dense-mask '12'",
         [](SynthSpec& s) {
             s.arch = "hy_v3";
             s.dense = "12";
         }},
        {"--dense-key",
         [](SynthSpec& s) {
             s.arch = "deepseek2";
             s.dense_key = 2;
         }},
        {"--pad-byte",
         [](SynthSpec& s) {
             s.sparse = true;
             s.pad_byte = 1;
         }},
        {"--arch does not go with --preset",
         [](SynthSpec& s) {
             s = qwen35_122b();
             s.arch = "llama";
         }},
        {"--type does not go with --preset",
         [](SynthSpec& s) {
             s = qwen35_122b();
             s.type = GGML_TYPE_Q8_0;
         }},
        {"--scale does not go with --preset",
         [](SynthSpec& s) {
             s = qwen35_122b();
             s.scale = true;
         }},
        {"--layers is 49", [](SynthSpec& s) { s = qwen35_122b(49); }},
        {"--layers is 3", [](SynthSpec& s) { s = qwen35_122b(3); }},
    };
    for (const Refused& refused : kRefused) {
        SynthSpec spec;
        refused.change(spec);
        const auto ok = check_spec(spec);
        ASSERT_FALSE(ok) << refused.what;
        EXPECT_EQ(ok.error().code, Errc::kUsage) << refused.what;
        EXPECT_NE(ok.error().detail.find(refused.what), std::string::npos) << ok.error().detail;
        EXPECT_EQ(ok.error().detail.find('\n'), std::string::npos) << ok.error().detail;
        EXPECT_FALSE(make_plan(spec)) << refused.what;
    }
}

TEST(Spec, TypeNamesParseInAnyCase) {
    EXPECT_EQ(*parse_type("Q4_K"), static_cast<uint32_t>(GGML_TYPE_Q4_K));
    EXPECT_EQ(*parse_type("bf16"), static_cast<uint32_t>(GGML_TYPE_BF16));
    for (const std::string& name : type_names()) EXPECT_TRUE(parse_type(name)) << name;
    for (const char* bad : {"", "q9", "q8_k", "i32"}) {
        const auto type = parse_type(bad);
        ASSERT_FALSE(type) << bad;
        EXPECT_EQ(type.error().code, Errc::kUsage);
    }
}

TEST(Vocabulary, TokensAreUniqueAndMergesClose) {
    for (uint32_t size : {kVocabMin, 384U, 512U, 5000U, 248'320U}) {
        const Vocabulary vocabulary = make_vocabulary(size);
        ASSERT_EQ(vocabulary.tokens.size(), size);
        ASSERT_EQ(vocabulary.types.size(), size);
        const std::set<std::string> known(vocabulary.tokens.begin(), vocabulary.tokens.end());
        EXPECT_EQ(known.size(), size);
        EXPECT_FALSE(vocabulary.merges.empty());
        for (const std::string& merge : vocabulary.merges) {
            const size_t space = merge.find(' ');
            ASSERT_NE(space, std::string::npos) << merge;
            const std::string left = merge.substr(0, space);
            const std::string right = merge.substr(space + 1);
            EXPECT_TRUE(known.contains(left) && known.contains(right) &&
                        known.contains(left + right))
                << merge;
        }
        EXPECT_EQ(vocabulary.tokens[vocabulary.end_of_text], "<|endoftext|>");
        EXPECT_EQ(vocabulary.tokens[vocabulary.end_of_turn], "<|im_end|>");
        EXPECT_EQ(vocabulary.types[vocabulary.end_of_turn], 3);
    }
}

}  // namespace
}  // namespace kvasir::synth
