// What tests of engine, worker and backbone share: a toy model on disk, its SwiGLU program, random
// rows.
//
// Used by *_test.cpp and fuzz targets only. Thread: one. Owns: the folder, removed at the end.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "engine/expert_engine.hpp"
#include "engine/kernels/kernels.hpp"
#include "engine/runtime.hpp"
#include "moe/mapping.hpp"
#include "moe/model.hpp"
#include "moe/program.hpp"
#include "synth/writer.hpp"

namespace kvasir::engine {

// Weights that lie in tensors of the test, which must outlive them.
struct WeightsForTests {
    static BankWeights over(const BankWeights::Tensors& tensors) {
        BankWeights weights;
        weights.tensors_ = tensors;
        return weights;
    }
};

}  // namespace kvasir::engine

namespace kvasir::engine::testing {

class Folder {
public:
    Folder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "kvasir_XXXXXX").string();
        KVASIR_CHECK(::mkdtemp(pattern.data()) != nullptr);
        path_ = pattern;
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    const std::string& path() const { return path_; }

private:
    std::string path_;
};

// qwen3moe, 256 wide: 8 experts of which 2 are used, in 2 layers.
inline synth::SynthSpec toy_spec(uint64_t seed = 1, uint32_t type = 12) {
    synth::SynthSpec spec;
    spec.arch = "qwen3moe";
    spec.layers = 2;
    spec.type = type;
    spec.seed = seed;
    spec.sync = false;
    return spec;
}

inline std::string write_toy(const Folder& folder, const std::string& name,
                             const synth::SynthSpec& spec) {
    auto report = synth::write_synth(spec, folder / name);
    KVASIR_CHECK(report.has_value());
    return report->paths.front();
}

inline ggml_backend_device* cpu() {
    KVASIR_CHECK(load_ggml().has_value());
    auto device = find_device("");
    KVASIR_CHECK(device.has_value());
    return *device;
}

inline std::unique_ptr<ExpertEngine> make_engine(uint32_t threads = 1,
                                                 ComputeWith with = ComputeWith::kKernels) {
    auto engine = ExpertEngine::make(cpu(), threads, with);
    KVASIR_CHECK(engine.has_value());
    return std::move(*engine);
}

// The kernels in plain C++, which every other set must give the bits of.
inline const kernels::Kernels& reference_kernels() {
    const kernels::KernelSets sets = kernels::available_kernels();
    return *sets.begin[sets.count - 1];
}

inline moe::ProgramOp product(moe::SlabRole role, uint8_t a) {
    moe::ProgramOp op;
    op.role = role;
    op.a = a;
    return op;
}

inline moe::ProgramOp step(moe::OpKind kind, uint8_t a, uint8_t b = 0, uint8_t sub = 0) {
    moe::ProgramOp op;
    op.kind = kind;
    op.a = a;
    op.b = b;
    op.sub = sub;
    return op;
}

inline moe::Program swiglu() {
    using moe::SlabRole;
    return {{product(SlabRole::kGate, 0), product(SlabRole::kUp, 0),
             step(moe::OpKind::kGlu, 1, 2, static_cast<uint8_t>(moe::GluKind::kSwiglu)),
             product(SlabRole::kDown, 3)}};
}

inline std::vector<float> random_floats(size_t count, uint64_t seed, float scale = 1) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> out(count);
    for (float& value : out) value = normal(random);
    return out;
}

inline std::span<const uint8_t> as_bytes(std::span<const float> values) {
    return {reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()};
}

// A file, its model and its mapping.
struct Toy {
    explicit Toy(const std::string& path) : model(open(path)), mapping(map(model)) {}
    static moe::Model open(const std::string& path) {
        auto opened = moe::open_model(path);
        KVASIR_CHECK(opened.has_value());
        return std::move(*opened);
    }
    static moe::Mapping map(const moe::Model& model) {
        auto mapped = moe::Mapping::make(model);
        KVASIR_CHECK(mapped.has_value());
        return std::move(*mapped);
    }
    std::shared_ptr<const Bank> prepare(ExpertEngine& engine, LayerKey layer,
                                        const moe::Program& program = swiglu(),
                                        kernels::NumericClass numeric = numeric_class()) const {
        const moe::ExpertBank* bank = model.find_bank(layer);
        KVASIR_CHECK(bank != nullptr);
        auto weights = BankWeights::map(*bank, mapping, cpu());
        KVASIR_CHECK(weights.has_value());
        auto prepared = engine.prepare(*bank, std::move(*weights), program, numeric);
        KVASIR_CHECK(prepared.has_value());
        return *prepared;
    }

    moe::Model model;
    moe::Mapping mapping;
};

}  // namespace kvasir::engine::testing
