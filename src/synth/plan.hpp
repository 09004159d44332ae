// The plan of a model file: metadata, and for each tensor its shape and where its values come from.
//
// make_plan() turns a spec into a plan; write_plan() (writer.hpp) turns a plan into files. Between
// the two a test may add, drop or rename tensors and keys to make files that no spec describes.
// Thread: values. Owns: everything, by value. Limits: those of the spec.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "synth/spec.hpp"

namespace kvasir::synth {

using MetaValue = std::variant<uint32_t, float, bool, std::string, std::vector<int32_t>,
                               std::vector<std::string>>;
struct MetaEntry {
    std::string key;
    MetaValue value;
};

enum class Fill : uint8_t {
    kGaussian,  // mean 0, standard deviation `scale`
    kNorm,      // 1 + gaussian * scale
    kUniform,   // uniform in [0.5, 1.5)
    kDecay,     // -uniform in [0.5, 1.5) * scale: decay rates must be negative
    kStep,      // -2 + gaussian * scale: time steps that keep some memory
};

// `rows` rows of each matrix come from the random stream named `stream`. Equal streams give equal
// values, so a fused gate_up tensor holds the very rows of the two tensors it replaces.
struct RowSource {
    std::string stream;
    uint64_t rows = 0;
};

struct TensorPlan {
    std::string name;
    uint32_t type = 0;  // ggml type
    uint32_t dims = 1;
    std::array<uint64_t, 4> ne = {1, 1, 1, 1};  // ne[0] is the row
    Fill fill = Fill::kGaussian;
    float scale = 1.0F;
    std::vector<RowSource> sources;  // rows add up to ne[1]; one matrix per ne[2]*ne[3]
};

struct Plan {
    std::vector<MetaEntry> meta;      // general.alignment and split.* are added by the writer
    std::vector<TensorPlan> tensors;  // in file order
    uint64_t seed = 1;
    uint32_t splits = 1;  // tensor i goes to shard i % splits
    uint32_t alignment = 32;
    uint8_t pad_byte = 0;
    bool sparse = false;
    bool sync = true;
    // Random blocks made directly where the type allows (fast); otherwise gaussian values are
    // quantised by ggml (real weights, slower).
    bool direct_blocks = false;
};

// Errors: kUsage from check_spec().
Result<Plan> make_plan(const SynthSpec& spec);

}  // namespace kvasir::synth
