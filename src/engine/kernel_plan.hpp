// A bank's expert program as steps over the kernels: what is multiplied when, and what happens to
// the rows in between.
//
// Made by ExpertEngine::prepare() for banks that the kernels cover; run by KernelRunner. Steps are
// grouped in phases: the products of a phase read what earlier phases left, and do not depend on
// each other. Thread: immutable after making. Owns: nothing; the weights outlive it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/kernels/kernels.hpp"
#include "engine/weights.hpp"
#include "moe/program.hpp"

namespace kvasir::engine {

// A register's rows, quantised as some products read them.
struct QuantisedRows {
    uint8_t reg = 0;
    kernels::WeightType arranged_for =
        kernels::WeightType::kQ8_0;  // row kind and Kernels::arrange()
    uint32_t width = 0;
    bool operator==(const QuantisedRows&) const = default;
};

struct ProductStep {
    uint8_t out = 0;     // register
    uint32_t input = 0;  // index into KernelPlan::inputs
    kernels::WeightType type = kernels::WeightType::kQ8_0;
    uint32_t width_in = 0;
    uint32_t width_out = 0;
    const uint8_t* weights = nullptr;
    uint64_t row_stride = 0;     // bytes
    uint64_t expert_stride = 0;  // bytes
};

struct RowStep {
    moe::ProgramOp op;
    uint8_t out = 0;
    uint32_t width = 0;
    const uint8_t* table = nullptr;  // kAddBias, kMulScale: f32 values of expert 0
    uint64_t expert_stride = 0;      // bytes
};

struct Phase {
    std::vector<ProductStep> products;
    std::vector<RowStep> rows;          // after the products
    std::vector<uint32_t> to_quantise;  // after the rows: indices into KernelPlan::inputs
};

class KernelPlan {
public:
    // What keeps a program from running on the kernels, in words; empty when nothing does. `name`
    // of a type is ggml's.
    static std::string obstacle(const moe::Program& program, const moe::ProgramShape& shape,
                                const BankWeights& weights);
    // Requires obstacle() to be empty.
    static KernelPlan make(const moe::Program& program, const moe::ProgramShape& shape,
                           const BankWeights& weights, kernels::NumericClass numeric);

    const std::vector<Phase>& phases() const { return phases_; }
    const std::vector<QuantisedRows>& inputs() const { return inputs_; }
    const std::vector<uint32_t>& width() const { return width_; }  // of the registers
    kernels::NumericClass numeric() const { return numeric_; }

private:
    uint32_t input_of(uint8_t reg, kernels::WeightType type);

    std::vector<Phase> phases_;
    std::vector<QuantisedRows> inputs_;
    std::vector<uint32_t> width_;
    kernels::NumericClass numeric_ = kernels::NumericClass::kOther;
};

}  // namespace kvasir::engine
