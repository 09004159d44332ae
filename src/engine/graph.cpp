#include "engine/graph.hpp"

#include "base/check.hpp"
#include "ggml-backend.h"

namespace kvasir::engine {
namespace {

constexpr uint64_t kTensorAlign = 64;

// An operation makes itself and at most two packed copies or a leaf; then input, ids and the
// output's copy.
size_t nodes_max(const moe::Program& program) {
    return 3 * program.ops.size() + 8;
}

uint64_t aligned(uint64_t bytes) {
    return (bytes + kTensorAlign - 1) / kTensorAlign * kTensorAlign;
}

ggml_unary_op unary_op(uint8_t sub) {
    switch (static_cast<moe::UnaryKind>(sub)) {
        case moe::UnaryKind::kSilu:
            return GGML_UNARY_OP_SILU;
        case moe::UnaryKind::kGelu:
            return GGML_UNARY_OP_GELU;
        case moe::UnaryKind::kGeluQuick:
            return GGML_UNARY_OP_GELU_QUICK;
        case moe::UnaryKind::kGeluErf:
            return GGML_UNARY_OP_GELU_ERF;
        case moe::UnaryKind::kRelu:
            return GGML_UNARY_OP_RELU;
        case moe::UnaryKind::kTanh:
            return GGML_UNARY_OP_TANH;
        case moe::UnaryKind::kSigmoid:
            return GGML_UNARY_OP_SIGMOID;
    }
    KVASIR_CHECK(false);
}

ggml_tensor* glu(ggml_context* context, const moe::ProgramOp& op, ggml_tensor* a, ggml_tensor* b) {
    switch (static_cast<moe::GluKind>(op.sub)) {
        case moe::GluKind::kReglu:
            return ggml_glu_split(context, a, b, GGML_GLU_OP_REGLU);
        case moe::GluKind::kGeglu:
            return ggml_glu_split(context, a, b, GGML_GLU_OP_GEGLU);
        case moe::GluKind::kSwiglu:
            return ggml_glu_split(context, a, b, GGML_GLU_OP_SWIGLU);
        case moe::GluKind::kGegluErf:
            return ggml_glu_split(context, a, b, GGML_GLU_OP_GEGLU_ERF);
        case moe::GluKind::kGegluQuick:
            return ggml_glu_split(context, a, b, GGML_GLU_OP_GEGLU_QUICK);
        case moe::GluKind::kSwigluOai:
            return ggml_swiglu_oai(context, a, b, op.f0, op.f1);
        case moe::GluKind::kSwigluClamp:
            return ggml_swiglu_clamp(context, a, b, op.f1);
    }
    KVASIR_CHECK(false);
}

// Views of a wider register have gaps between rows. GLU and unary kernels take such rows (and
// llama.cpp gives them those); everything else gets a packed copy, which changes no bit.
ggml_tensor* packed(ggml_context* context, ggml_tensor* tensor) {
    return ggml_is_contiguous(tensor) ? tensor : ggml_cont(context, tensor);
}

class Builder {
public:
    Builder(const Bank& bank, PairGraph& graph, RowLayout layout, uint32_t pairs)
        : bank_(bank), graph_(graph), context_(graph.context.get()) {
        const auto count = static_cast<int64_t>(pairs);
        used_ = layout == RowLayout::kShared ? count : 1;
        tokens_ = layout == RowLayout::kShared ? 1 : count;
    }

    void run(uint32_t row_type) {
        graph_.input = ggml_new_tensor_3d(context_, static_cast<ggml_type>(row_type),
                                          bank_.shape.input(), 1, tokens_);
        graph_.ids = ggml_new_tensor_2d(context_, GGML_TYPE_I32, used_, tokens_);
        registers_.push_back(graph_.input);
        for (const moe::ProgramOp& op : bank_.program.ops) registers_.push_back(emit(op));
        graph_.output = packed(context_, registers_.back());
        graph_.graph = ggml_new_graph_custom(context_, nodes_max(bank_.program), false);
        ggml_build_forward_expand(graph_.graph, graph_.output);
    }

private:
    ggml_tensor* emit(const moe::ProgramOp& op) {
        ggml_tensor* a = registers_[op.a];
        switch (op.kind) {
            case moe::OpKind::kMatMul:
                return ggml_mul_mat_id(context_, weight(op, moe::SlabPart::kWeight),
                                       packed(context_, a), graph_.ids);
            case moe::OpKind::kAddBias:
                return ggml_add_id(context_, packed(context_, a), weight(op, moe::SlabPart::kBias),
                                   graph_.ids);
            case moe::OpKind::kMulScale:
                return mul_scale(op, packed(context_, a));
            case moe::OpKind::kUnary:
                return ggml_unary(context_, a, unary_op(op.sub));
            case moe::OpKind::kGlu:
                return glu(context_, op, a, registers_[op.b]);
            case moe::OpKind::kMul:
                return ggml_mul(context_, packed(context_, a), packed(context_, registers_[op.b]));
            case moe::OpKind::kAdd:
                return ggml_add(context_, packed(context_, a), packed(context_, registers_[op.b]));
            case moe::OpKind::kScale:
                return ggml_scale_bias(context_, packed(context_, a), op.f0, op.f1);
            case moe::OpKind::kClamp:
                return ggml_clamp(context_, packed(context_, a), op.f0, op.f1);
            case moe::OpKind::kSqr:
                return ggml_sqr(context_, packed(context_, a));
            case moe::OpKind::kView:
                return ggml_view_3d(context_, a, op.view_count, a->ne[1], a->ne[2], a->nb[1],
                                    a->nb[2], op.view_begin * sizeof(float));
        }
        KVASIR_CHECK(false);
    }

    ggml_tensor* mul_scale(const moe::ProgramOp& op, ggml_tensor* a) {
        ggml_tensor* leaf = ggml_new_tensor_3d(context_, GGML_TYPE_F32, 1, used_, tokens_);
        graph_.scales.push_back({leaf, weight(op, moe::SlabPart::kScale)});
        return ggml_mul(context_, a, leaf);
    }

    ggml_tensor* weight(const moe::ProgramOp& op, moe::SlabPart part) const {
        return bank_.weights.get(op.role, part);
    }

    const Bank& bank_;
    PairGraph& graph_;
    ggml_context* context_;
    int64_t used_ = 1;
    int64_t tokens_ = 1;
    std::vector<ggml_tensor*> registers_;
};

}  // namespace

PairGraph build_graph(const Bank& bank, uint32_t row_type, RowLayout layout, uint32_t pairs) {
    PairGraph graph;
    const size_t tensors = nodes_max(bank.program);
    const ggml_init_params params = {
        ggml_tensor_overhead() * tensors + ggml_graph_overhead_custom(tensors, false), nullptr,
        true};
    graph.context.reset(ggml_init(params));
    KVASIR_CHECK(graph.context != nullptr);
    Builder(bank, graph, layout, pairs).run(row_type);
    for (ggml_tensor* t = ggml_get_first_tensor(graph.context.get()); t != nullptr;
         t = ggml_get_next_tensor(graph.context.get(), t)) {
        if (t->view_src == nullptr) graph.arena_bytes += aligned(ggml_nbytes(t));
    }
    return graph;
}

void place(PairGraph& graph, ggml_backend_buffer* buffer) {
    auto* base = static_cast<uint8_t*>(ggml_backend_buffer_get_base(buffer));
    uint64_t offset = 0;
    ggml_context* context = graph.context.get();
    for (ggml_tensor* t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
        t->buffer = nullptr;
        t->data = nullptr;
        if (t->view_src != nullptr) {
            ggml_backend_view_init(t);
            continue;
        }
        ggml_backend_tensor_alloc(buffer, t, base + offset);
        offset += aligned(ggml_nbytes(t));
    }
}

}  // namespace kvasir::engine
