// Stock llama.cpp loads and runs what kvasir-synth agrees to write.
#include <ggml-backend.h>
#include <gtest/gtest.h>
#include <llama.h>

#include <cmath>
#include <memory>
#include <string_view>
#include <vector>

#include "synth/test_files.hpp"
#include "synth/writer.hpp"

namespace kvasir::synth {
namespace {

struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
};

void start_llama() {
    static const bool kStarted = [] {
        llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
        ggml_backend_load_all_from_path(KVASIR_LLAMA_LIB);
        llama_backend_init();
        return true;
    }();
    ASSERT_TRUE(kStarted);
}

std::unique_ptr<llama_model, Free> load(const std::string& path) {
    llama_model_params params = llama_model_default_params();
    params.use_extra_bufts = false;
    return std::unique_ptr<llama_model, Free>(llama_model_load_from_file(path.c_str(), params));
}

// Logits after a short text; empty when something failed.
std::vector<float> run(llama_model* model, std::string_view text) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 128;
    params.n_threads = params.n_threads_batch = 1;
    const std::unique_ptr<llama_context, Free> context(llama_init_from_model(model, params));
    if (!context) return {};
    const llama_vocab* vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 8);
    const int count =
        llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                       static_cast<int32_t>(tokens.size()), false, true);
    if (count <= 0 || llama_decode(context.get(), llama_batch_get_one(tokens.data(), count)) != 0)
        return {};
    const float* logits = llama_get_logits_ith(context.get(), -1);
    return {logits, logits + llama_vocab_n_tokens(vocab)};
}

constexpr std::string_view kText = "Hello bado fika, w\xc3\xb6rld 123!\n";

std::vector<float> logits_of(const SynthSpec& spec) {
    start_llama();
    const ScratchFolder folder;
    const auto report = write_synth(spec, folder / "m.gguf");
    EXPECT_TRUE(report) << report.error().detail;
    if (!report) return {};
    const auto model = load(report->paths.front());
    return model ? run(model.get(), kText) : std::vector<float>();
}

SynthSpec small(const char* arch) {
    SynthSpec spec;
    spec.arch = arch;
    spec.embd = 64;
    spec.ff = 32;
    spec.type = GGML_TYPE_Q8_0;
    spec.sync = false;
    return spec;
}

void expect_sane(const std::vector<float>& logits, std::string_view what) {
    ASSERT_FALSE(logits.empty()) << what;
    double squares = 0;
    for (float value : logits) {
        ASSERT_TRUE(std::isfinite(value)) << what;
        squares += double{value} * value;
    }
    const double rms = std::sqrt(squares / static_cast<double>(logits.size()));
    EXPECT_GT(rms, 0.5) << what;
    EXPECT_LT(rms, 8.0) << what;
}

struct Variant {
    const char* what;
    const char* arch;
    void (*change)(SynthSpec&);
};
const Variant kVariants[] = {
    {"plain", "qwen35moe", [](SynthSpec&) {}},
    {"plain", "qwen3moe", [](SynthSpec&) {}},
    {"plain", "deepseek2", [](SynthSpec&) {}},
    {"plain", "gpt-oss", [](SynthSpec&) {}},
    {"plain", "hy_v3", [](SynthSpec&) {}},
    {"plain", "llama", [](SynthSpec&) {}},
    {"two layers", "qwen35moe", [](SynthSpec& s) { s.layers = 2; }},
    {"mtp", "qwen35moe", [](SynthSpec& s) { s.mtp = true; }},
    {"mtp", "deepseek2",
     [](SynthSpec& s) {
         s.mtp = true;
         s.dense = "1100";
     }},
    {"mtp, mixed fusion, scales", "hy_v3",
     [](SynthSpec& s) {
         s.mtp = true;
         s.fused = "0101";
         s.scale = true;
     }},
    {"interleaved dense, wrong key", "hy_v3",
     [](SynthSpec& s) {
         s.dense = "0101";
         s.dense_key = 3;
     }},
    {"all dense", "hy_v3", [](SynthSpec& s) { s.dense = "1111"; }},
    {"fused, scales, two shared", "qwen35moe",
     [](SynthSpec& s) {
         s.fused = "1111";
         s.scale = true;
         s.shared = 2;
     }},
    {"scales", "qwen3moe", [](SynthSpec& s) { s.scale = true; }},
    {"scales", "llama", [](SynthSpec& s) { s.scale = true; }},
    {"mxfp4", "gpt-oss",
     [](SynthSpec& s) {
         s.type = GGML_TYPE_MXFP4;
         s.bias = true;
     }},
    {"k-quants", "deepseek2",
     [](SynthSpec& s) {
         s.embd = s.ff = 256;
         s.type = GGML_TYPE_Q4_K;
         s.type_down = GGML_TYPE_Q6_K;
     }},
    {"narrow floats", "llama",
     [](SynthSpec& s) {
         s.embd = 16;
         s.ff = 16;
         s.type = GGML_TYPE_F32;
         s.type_dense = GGML_TYPE_BF16;
     }},
    {"one expert", "gpt-oss", [](SynthSpec& s) { s.experts = s.used = 1; }},
    {"all experts used", "qwen3moe", [](SynthSpec& s) { s.experts = s.used = 12; }},
    {"smallest vocabulary", "llama", [](SynthSpec& s) { s.vocab = kVocabMin; }},
};

TEST(StockLlama, RunsEveryVariant) {
    for (const Variant& variant : kVariants) {
        SynthSpec spec = small(variant.arch);
        variant.change(spec);
        expect_sane(logits_of(spec), std::string(variant.arch) + " " + variant.what);
    }
}

TEST(StockLlama, LayoutOfTheFileDoesNotChangeTheLogits) {
    for (const char* arch : {"qwen35moe", "hy_v3"}) {
        const auto plain = logits_of(small(arch));
        expect_sane(plain, arch);
        SynthSpec spec = small(arch);
        spec.splits = 12;
        spec.order = TensorOrder::kShuffle;
        spec.alignment = 4096;
        spec.pad_byte = 0xAA;
        EXPECT_EQ(logits_of(spec), plain) << arch;
        spec = small(arch);
        spec.fused = "1011";
        EXPECT_EQ(logits_of(spec), plain) << arch;
        spec.fused_swap = true;
        EXPECT_NE(logits_of(spec), plain) << arch;
    }
}

TEST(StockLlama, TokenisesAndBack) {
    start_llama();
    const ScratchFolder folder;
    SynthSpec spec = small("llama");
    spec.vocab = 5000;
    ASSERT_TRUE(write_synth(spec, folder / "m.gguf"));
    const auto model = load(folder / "m.gguf");
    ASSERT_TRUE(model);
    const llama_vocab* vocab = llama_model_get_vocab(model.get());
    std::vector<llama_token> tokens(64);
    const auto tokenise = [&](std::string_view text) {
        return llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                              64, false, true);
    };
    EXPECT_EQ(tokenise(" bado"), 1);  // a word of two syllables is one token
    const int count = tokenise(kText);
    ASSERT_GT(count, 0);
    std::string back(128, '\0');
    back.resize(static_cast<size_t>(
        llama_detokenize(vocab, tokens.data(), count, back.data(), 128, false, true)));
    EXPECT_EQ(back, kText);
    EXPECT_EQ(tokenise("<|im_end|>"), 1);
    EXPECT_TRUE(llama_vocab_is_eog(vocab, tokens[0]));
}

}  // namespace
}  // namespace kvasir::synth
