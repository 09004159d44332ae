// Toy models, scratch folders and raw file access for the tests of manifest, slice and verify.
//
// Used by src/moe/*_test.cpp only. A toy has every layout a slice must cut: fused and separate
// gate/up, biases, scales, a second bank, dense layers, an MTP layer, mixed types, splits. Thread:
// one. Owns: ScratchFolder its folder. Limits: failures abort the test with KVASIR_CHECK.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <rapidcheck.h>
#include <unistd.h>

#include "base/check.hpp"
#include "moe/model.hpp"
#include "synth/plan.hpp"
#include "synth/writer.hpp"

namespace kvasir::moe::testing {

class ScratchFolder {
public:
    ScratchFolder() {
        // In memory where possible: hundreds of fsyncs to a disk would dominate the tests.
        const bool in_memory = ::access("/dev/shm", W_OK) == 0;
        const auto base =
            in_memory ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path();
        std::string name = (base / "kvasir-test-XXXXXX").string();
        KVASIR_CHECK(::mkdtemp(name.data()) != nullptr);
        path_ = name;
    }
    ~ScratchFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    ScratchFolder(const ScratchFolder&) = delete;
    ScratchFolder& operator=(const ScratchFolder&) = delete;

    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    const std::string& path() const { return path_; }
    std::vector<std::string> names() const {
        std::vector<std::string> out;
        for (const auto& entry : std::filesystem::directory_iterator(path_)) {
            out.push_back(entry.path().filename().string());
        }
        std::sort(out.begin(), out.end());
        return out;
    }

private:
    std::string path_;
};

inline std::vector<uint8_t> read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    KVASIR_CHECK(in.is_open());
    return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_file(const std::string& path, const std::vector<uint8_t>& data) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(data.data()),
              static_cast<std::streamsize>(data.size()));
    KVASIR_CHECK(out.good());
}

// ggml type numbers with their block sizes.
constexpr uint32_t kF32 = 0, kF16 = 1, kQ8_0 = 8, kQ4_K = 12, kQ6_K = 14;

struct ToyShape {
    uint32_t layers = 2;  // with experts
    uint32_t dense = 0;   // dense layers before them
    uint32_t experts = 4;
    uint64_t embd = 256;
    uint64_t ff = 256;
    uint32_t type = kQ4_K;
    uint32_t type_down = kQ6_K;
    bool fused = false;
    bool bias = false;
    bool scale = false;
    bool chunk = false;  // a second bank (chexps) of two experts
    bool mtp = false;    // the last layer is an MTP layer
    uint32_t splits = 1;
    uint32_t alignment = 32;
    uint64_t seed = 1;
};

// Inside a property: any of the layouts.
inline ToyShape any_shape() {
    ToyShape shape;
    shape.layers = *rc::gen::inRange<uint32_t>(1, 4);
    shape.dense = *rc::gen::inRange<uint32_t>(0, 2);
    shape.experts = *rc::gen::inRange<uint32_t>(2, 9);
    shape.type = *rc::gen::element(kF32, kF16, kQ8_0, kQ4_K);
    shape.type_down = *rc::gen::element(kF16, kQ8_0, kQ6_K);
    const bool quantised = shape.type == kQ4_K || shape.type_down == kQ6_K;
    shape.embd = quantised ? 256 : *rc::gen::element<uint64_t>(32, 96, 160);
    shape.ff = quantised ? 256 : *rc::gen::element<uint64_t>(32, 64, 224);
    shape.fused = *rc::gen::arbitrary<bool>();
    shape.bias = *rc::gen::arbitrary<bool>();
    shape.scale = *rc::gen::arbitrary<bool>();
    shape.chunk = *rc::gen::arbitrary<bool>();
    shape.mtp = *rc::gen::arbitrary<bool>();
    shape.splits = *rc::gen::element<uint32_t>(1, 1, 2, 3, 12);
    shape.alignment = *rc::gen::element<uint32_t>(8, 32, 64, 4096);
    shape.seed = *rc::gen::arbitrary<uint32_t>();
    return shape;
}

inline void add_toy_tensor(synth::Plan& plan, std::string name, uint32_t type,
                           std::vector<uint64_t> ne) {
    synth::TensorPlan tensor;
    tensor.name = std::move(name);
    tensor.type = type;
    tensor.dims = static_cast<uint32_t>(ne.size());
    for (size_t i = 0; i < ne.size(); ++i) tensor.ne[i] = ne[i];
    tensor.sources = {{tensor.name, tensor.ne[1]}};
    plan.tensors.push_back(std::move(tensor));
}

inline void add_toy_bank(synth::Plan& plan, const ToyShape& shape, const std::string& block,
                         const std::string& exps, uint32_t experts) {
    const auto add = [&](const std::string& role, uint32_t type, uint64_t in, uint64_t out) {
        const std::string base = block + "ffn_" + role + "_" + exps;
        add_toy_tensor(plan, base + ".weight", type, {in, out, experts});
        if (shape.bias) add_toy_tensor(plan, base + ".bias", kF32, {out, experts});
        if (shape.scale) add_toy_tensor(plan, base + ".scale", kF32, {experts});
    };
    if (shape.fused) {
        add("gate_up", shape.type, shape.embd, 2 * shape.ff);
    } else {
        add("gate", shape.type, shape.embd, shape.ff);
        add("up", shape.type, shape.embd, shape.ff);
    }
    add("down", shape.type_down, shape.ff, shape.embd);
}

inline synth::Plan toy_plan(const ToyShape& shape) {
    const std::string arch = shape.chunk ? "grovemoe" : "qwen3moe";
    synth::Plan plan;
    plan.seed = shape.seed;
    plan.splits = shape.splits;
    plan.alignment = shape.alignment;
    plan.direct_blocks = true;
    const uint32_t blocks = shape.dense + shape.layers;
    plan.meta = {
        {"general.architecture", arch},
        {"general.name", std::string("toy")},
        {arch + ".block_count", blocks},
        {arch + ".embedding_length", static_cast<uint32_t>(shape.embd)},
        {arch + ".expert_count", shape.experts},
        {arch + ".expert_used_count", uint32_t{1}},
        {arch + ".rope.scaling.factor", 1.5F},
        {arch + ".flag", true},
        {arch + ".sections", std::vector<int32_t>{1, -2, 3}},
        {"general.tags", std::vector<std::string>{"a", ""}},
        {"tokenizer.ggml.model", std::string("none")},
        {"tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"}},
        {"general.license.text", std::string(5000, 'x')},
    };
    if (shape.mtp) plan.meta.push_back({arch + ".nextn_predict_layers", uint32_t{1}});
    add_toy_tensor(plan, "token_embd.weight", kF16, {shape.embd, 5});
    for (uint32_t layer = 0; layer < blocks; ++layer) {
        const std::string block = "blk." + std::to_string(layer) + ".";
        add_toy_tensor(plan, block + "attn_norm.weight", kF32, {shape.embd});
        add_toy_tensor(plan, block + "attn_q.weight", kF16, {shape.embd, 3});
        if (layer < shape.dense) {
            add_toy_tensor(plan, block + "ffn_down.weight", kF16, {shape.ff, shape.embd});
            continue;
        }
        add_toy_tensor(plan, block + "ffn_gate_inp.weight", kF32, {shape.embd, shape.experts});
        add_toy_bank(plan, shape, block, "exps", shape.experts);
        if (shape.chunk) add_toy_bank(plan, shape, block, "chexps", 2);
    }
    plan.splits = std::min(plan.splits, static_cast<uint32_t>(plan.tensors.size()));
    return plan;
}

// Writes the toy and returns the path of its first file.
inline std::string write_toy(const ScratchFolder& folder, const ToyShape& shape,
                             const std::string& name = "toy.gguf") {
    const auto report = synth::write_plan(toy_plan(shape), folder / name);
    if (!report) std::fprintf(stderr, "%s\n", report.error().detail.c_str());
    KVASIR_CHECK(report.has_value());
    return report->paths.front();
}

inline Model open_toy(const std::string& path) {
    auto model = open_model(path);
    if (!model) std::fprintf(stderr, "%s\n", model.error().detail.c_str());
    KVASIR_CHECK(model.has_value());
    return std::move(*model);
}

inline std::vector<uint8_t> slab(const Model& model, const SlabTensor& tensor, uint32_t position) {
    std::ifstream in(model.shards[tensor.shard].path, std::ios::binary);
    std::vector<uint8_t> out(tensor.slab_bytes);
    in.seekg(static_cast<std::streamoff>(tensor.offset + position * tensor.slab_bytes));
    in.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
    KVASIR_CHECK(in.good());
    return out;
}

}  // namespace kvasir::moe::testing
