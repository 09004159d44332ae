#include "engine/kernel_plan.hpp"

#include <algorithm>

#include "base/check.hpp"
#include "ggml.h"

namespace kvasir::engine {
namespace {

using kernels::WeightType;

bool reads_b(const moe::ProgramOp& op) {
    return op.kind == moe::OpKind::kGlu || op.kind == moe::OpKind::kMul ||
           op.kind == moe::OpKind::kAdd;
}

bool covers_unary(uint8_t sub) {
    switch (static_cast<moe::UnaryKind>(sub)) {
        case moe::UnaryKind::kSilu:
        case moe::UnaryKind::kGelu:
        case moe::UnaryKind::kRelu:
            return true;
        default:
            return false;
    }
}

bool covers_glu(uint8_t sub) {
    switch (static_cast<moe::GluKind>(sub)) {
        case moe::GluKind::kReglu:
        case moe::GluKind::kGeglu:
        case moe::GluKind::kSwiglu:
        case moe::GluKind::kSwigluOai:
            return true;
        default:
            return false;
    }
}

// ggml's vector code for SiLU takes 16 values at a time and leaves the rest to the C library.
bool has_rest(const moe::ProgramOp& op, uint32_t width) {
    const bool silu =
        (op.kind == moe::OpKind::kUnary && op.sub == static_cast<uint8_t>(moe::UnaryKind::kSilu)) ||
        (op.kind == moe::OpKind::kGlu && op.sub == static_cast<uint8_t>(moe::GluKind::kSwiglu));
    return silu && width % 16 != 0;
}

std::string product_obstacle(const ggml_tensor& weights) {
    const auto width = static_cast<uint64_t>(weights.ne[0]);
    if (kernels::covers(static_cast<WeightType>(weights.type), width)) return {};
    return std::string("weights of type ") + ggml_type_name(weights.type) + ", rows of " +
           std::to_string(width);
}

std::string op_obstacle(const moe::ProgramOp& op, uint32_t width, const BankWeights& weights) {
    switch (op.kind) {
        case moe::OpKind::kMatMul:
            return product_obstacle(*weights.get(op.role, moe::SlabPart::kWeight));
        case moe::OpKind::kUnary:
            if (!covers_unary(op.sub)) return "activation " + std::to_string(op.sub);
            break;
        case moe::OpKind::kGlu:
            if (!covers_glu(op.sub)) return "gated activation " + std::to_string(op.sub);
            break;
        default:
            break;
    }
    return has_rest(op, width) ? "SiLU over " + std::to_string(width) + " values" : std::string();
}

}  // namespace

std::string KernelPlan::obstacle(const moe::Program& program, const moe::ProgramShape& shape,
                                 const BankWeights& weights) {
    for (size_t i = 0; i < program.ops.size(); ++i) {
        std::string found = op_obstacle(program.ops[i], shape.width[i + 1], weights);
        if (!found.empty()) return found;
    }
    return {};
}

uint32_t KernelPlan::input_of(uint8_t reg, WeightType type) {
    const QuantisedRows wanted{reg, type, width_[reg]};
    const auto found = std::find(inputs_.begin(), inputs_.end(), wanted);
    if (found != inputs_.end()) return static_cast<uint32_t>(found - inputs_.begin());
    inputs_.push_back(wanted);
    return static_cast<uint32_t>(inputs_.size() - 1);
}

KernelPlan KernelPlan::make(const moe::Program& program, const moe::ProgramShape& shape,
                            const BankWeights& weights, kernels::NumericClass numeric) {
    KVASIR_CHECK(obstacle(program, shape, weights).empty());
    KernelPlan plan;
    plan.numeric_ = numeric;
    plan.width_ = shape.width;
    // The phase after which a register is there; the input is there before phase 0.
    std::vector<int> ready(program.ops.size() + 1, -1);
    for (size_t i = 0; i < program.ops.size(); ++i) {
        const moe::ProgramOp& op = program.ops[i];
        const auto out = static_cast<uint8_t>(i + 1);
        const int inputs = std::max(ready[op.a], reads_b(op) ? ready[op.b] : -1);
        ready[out] = op.kind == moe::OpKind::kMatMul ? inputs + 1 : inputs;
        KVASIR_CHECK(ready[out] >= 0);  // moe::validate: the input is read by products only
        const auto at = static_cast<size_t>(ready[out]);
        if (plan.phases_.size() <= at) plan.phases_.resize(at + 1);
        if (op.kind == moe::OpKind::kMatMul) {
            const ggml_tensor* w = weights.get(op.role, moe::SlabPart::kWeight);
            const auto type = static_cast<WeightType>(w->type);
            const size_t known = plan.inputs_.size();
            const uint32_t input = plan.input_of(op.a, type);
            if (input == known && inputs >= 0) {
                plan.phases_[static_cast<size_t>(inputs)].to_quantise.push_back(input);
            }
            plan.phases_[at].products.push_back(
                {out, input, type, shape.width[op.a], shape.width[out],
                 static_cast<const uint8_t*>(w->data), w->nb[1], w->nb[2]});
            continue;
        }
        RowStep step{op, out, shape.width[out], nullptr, 0};
        if (op.kind == moe::OpKind::kAddBias || op.kind == moe::OpKind::kMulScale) {
            const bool bias = op.kind == moe::OpKind::kAddBias;
            const ggml_tensor* table =
                weights.get(op.role, bias ? moe::SlabPart::kBias : moe::SlabPart::kScale);
            step.table = static_cast<const uint8_t*>(table->data);
            step.expert_stride = bias ? table->nb[1] : table->nb[0];
        }
        plan.phases_[at].rows.push_back(step);
    }
    return plan;
}

}  // namespace kvasir::engine
