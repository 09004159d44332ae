#include "plugin/capture.hpp"

#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "ggml-backend.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "moe/classify.hpp"

namespace kvasir::plugin {
namespace {

constexpr int kDeriveDepthMax = 16;  // longest chain is_expert_op() follows back to a product

bool is_row_wise(const ggml_tensor* node) {
    switch (node->op) {
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_ADD_ID:
        case GGML_OP_MUL:
        case GGML_OP_ADD:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_SQR:
            return true;
        default:
            return false;
    }
}

bool is_view(const ggml_tensor* node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE;
}

std::optional<moe::ExpertTensorName> weight_of(const ggml_tensor* tensor) {
    return tensor == nullptr ? std::nullopt : moe::parse_expert_name(tensor->name);
}

enum class Origin { kOther, kFirst, kLast };

// What product, if any, a value comes from.
Origin origin(const ggml_tensor* node, int depth) {
    if (node == nullptr || depth > kDeriveDepthMax) return Origin::kOther;
    if (node->op == GGML_OP_MUL_MAT_ID) {
        const auto name = weight_of(node->src[0]);
        if (!name || name->part != moe::SlabPart::kWeight) return Origin::kOther;
        return name->role == moe::SlabRole::kDown ? Origin::kLast : Origin::kFirst;
    }
    if (is_view(node)) return origin(node->src[0], depth + 1);
    if (is_row_wise(node)) return origin(node->src[0], depth + 1);
    return Origin::kOther;
}

// The *_exps.scale tensor behind reshape/repeat/get_rows, or null.
const ggml_tensor* scale_source(const ggml_tensor* node) {
    for (int depth = 0; node != nullptr && depth < 4; ++depth) {
        if (const auto name = weight_of(node); name && name->part == moe::SlabPart::kScale)
            return node;
        if (node->op != GGML_OP_GET_ROWS && node->op != GGML_OP_REPEAT &&
            node->op != GGML_OP_RESHAPE) {
            return nullptr;
        }
        node = node->src[0];
    }
    return nullptr;
}

std::optional<uint8_t> unary_kind(const ggml_tensor* node) {
    using moe::UnaryKind;
    switch (ggml_get_unary_op(node)) {
        case GGML_UNARY_OP_SILU:
            return static_cast<uint8_t>(UnaryKind::kSilu);
        case GGML_UNARY_OP_GELU:
            return static_cast<uint8_t>(UnaryKind::kGelu);
        case GGML_UNARY_OP_GELU_QUICK:
            return static_cast<uint8_t>(UnaryKind::kGeluQuick);
        case GGML_UNARY_OP_GELU_ERF:
            return static_cast<uint8_t>(UnaryKind::kGeluErf);
        case GGML_UNARY_OP_RELU:
            return static_cast<uint8_t>(UnaryKind::kRelu);
        case GGML_UNARY_OP_TANH:
            return static_cast<uint8_t>(UnaryKind::kTanh);
        case GGML_UNARY_OP_SIGMOID:
            return static_cast<uint8_t>(UnaryKind::kSigmoid);
        default:
            return std::nullopt;
    }
}

std::optional<uint8_t> glu_kind(const ggml_tensor* node) {
    using moe::GluKind;
    switch (ggml_get_glu_op(node)) {
        case GGML_GLU_OP_REGLU:
            return static_cast<uint8_t>(GluKind::kReglu);
        case GGML_GLU_OP_GEGLU:
            return static_cast<uint8_t>(GluKind::kGeglu);
        case GGML_GLU_OP_SWIGLU:
            return static_cast<uint8_t>(GluKind::kSwiglu);
        case GGML_GLU_OP_SWIGLU_OAI:
            return static_cast<uint8_t>(GluKind::kSwigluOai);
        case GGML_GLU_OP_GEGLU_ERF:
            return static_cast<uint8_t>(GluKind::kGegluErf);
        case GGML_GLU_OP_GEGLU_QUICK:
            return static_cast<uint8_t>(GluKind::kGegluQuick);
        case GGML_GLU_OP_SWIGLU_CLAMP:
            return static_cast<uint8_t>(GluKind::kSwigluClamp);
        default:
            return std::nullopt;
    }
}

float param_f32(const ggml_tensor* node, int index) {
    float value = 0;
    std::memcpy(&value, reinterpret_cast<const char*>(node->op_params) + 4 * index, sizeof(value));
    return value;
}

// Builds the program of one bank, node by node.
class BankCapture {
public:
    explicit BankCapture(LayerKey layer) { out_.layer = layer; }

    LayerKey layer() const { return out_.layer; }

    Status add(ggml_tensor* node) {
        if ((node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) flagged_.push_back(node);
        switch (node->op) {
            case GGML_OP_NONE:
            case GGML_OP_REPEAT:
            case GGML_OP_GET_ROWS:
                return {};
            case GGML_OP_VIEW:
            case GGML_OP_RESHAPE:
                return view(node);
            case GGML_OP_MUL_MAT_ID:
                return product(node);
            case GGML_OP_ADD_ID:
                return bias(node);
            case GGML_OP_UNARY: {
                const auto kind = unary_kind(node);
                if (!kind) return refuse(node, "unary operation is not on the list");
                return row_wise(node, moe::OpKind::kUnary, *kind);
            }
            case GGML_OP_GLU:
                return glu(node);
            case GGML_OP_MUL:
                return mul(node);
            case GGML_OP_ADD:
                return row_wise(node, moe::OpKind::kAdd, 0, node->src[1]);
            case GGML_OP_SCALE:
                return row_wise(node, moe::OpKind::kScale, 0);
            case GGML_OP_CLAMP:
                return row_wise(node, moe::OpKind::kClamp, 0);
            case GGML_OP_SQR:
                return row_wise(node, moe::OpKind::kSqr, 0);
            default:
                return refuse(node, "operation is not on the list");
        }
    }

    // `graph`: the split that the nodes are of.
    Result<Captured> finish(const ggml_cgraph* graph) {
        if (out_.program.ops.empty()) return fail(Errc::kUnsupported, "no expert operations");
        const size_t last = out_.program.ops.size();
        std::vector<int> uses(last + 1, 0);
        bool has_down = false;
        for (const moe::ProgramOp& op : out_.program.ops) {
            ++uses[op.a];
            if (op.kind == moe::OpKind::kGlu || op.kind == moe::OpKind::kMul ||
                op.kind == moe::OpKind::kAdd) {
                ++uses[op.b];
            }
            if (op.kind != moe::OpKind::kMatMul || op.role != moe::SlabRole::kDown) continue;
            if (op.a == 0)
                return fail(Errc::kUnsupported, "the last product reads the input (partial graph)");
            has_down = true;
        }
        if (!has_down) return fail(Errc::kUnsupported, "no last product (partial graph)");
        for (size_t i = 1; i < last; ++i) {
            if (uses[i] == 0)
                return fail(Errc::kUnsupported, "an intermediate value leaves the chain");
        }
        for (const ggml_tensor* node : flagged_) {
            if (is_intermediate(node)) {
                return fail(Errc::kUnsupported,
                            std::string("intermediate ") + node->name + " is an output");
            }
        }
        if (Status ok = check_uses(graph); !ok) return tl::unexpected(ok.error());
        return std::move(out_);
    }

private:
    static Status refuse(const ggml_tensor* node, const char* why) {
        return fail(Errc::kUnsupported,
                    std::string(node->name) + " (" + ggml_op_desc(node) + "): " + why);
    }

    // A value of the chain that workers do not return.
    bool is_intermediate(const ggml_tensor* node) const {
        const auto value = find(node);
        return value && *value != 0 && *value != out_.program.ops.size();
    }

    // Does a node outside this split read an intermediate value (a low-rank adapter of the last
    // product does)? ggml counts the uses of every node over the whole graph.
    Status check_uses(const ggml_cgraph* graph) const {
        std::map<const ggml_tensor*, int> inside;
        for (int i = 0; i < graph->n_nodes; ++i) {
            for (const ggml_tensor* source : graph->nodes[i]->src) {
                if (source != nullptr && is_intermediate(source)) ++inside[source];
            }
        }
        for (int i = 0; i < graph->n_nodes; ++i) {
            const ggml_tensor* node = graph->nodes[i];
            if (is_intermediate(node) && ggml_node_get_use_count(graph, i) != inside[node]) {
                return refuse(node, "is read elsewhere too");
            }
        }
        return {};
    }

    std::optional<uint8_t> find(const ggml_tensor* tensor) const {
        for (const auto& [known, index] : registers_) {
            if (known == tensor) return index;
        }
        return std::nullopt;
    }

    Status push(ggml_tensor* node, moe::ProgramOp op) {
        if (out_.program.ops.size() >= moe::kProgramOpsMax) return refuse(node, "program too long");
        out_.program.ops.push_back(op);
        registers_.emplace_back(node, static_cast<uint8_t>(out_.program.ops.size()));
        out_.output = node;
        return {};
    }

    Status use_weight(const ggml_tensor* node, ggml_tensor* tensor, moe::SlabPart part,
                      moe::ProgramOp& op) {
        const auto name = weight_of(tensor);
        if (!name || name->key != out_.layer || name->part != part) {
            return refuse(node, "weights of another layer or kind");
        }
        ggml_tensor*& slot = out_.weights[engine::BankWeights::index(name->role, part)];
        if (slot != nullptr && slot != tensor) return refuse(node, "two tensors of one name");
        slot = tensor;
        op.role = name->role;
        return {};
    }

    bool same_ids(ggml_tensor* ids) {
        if (out_.ids == nullptr) out_.ids = ids;
        return out_.ids == ids;
    }

    Status product(ggml_tensor* node) {
        moe::ProgramOp op;
        op.kind = moe::OpKind::kMatMul;
        if (Status ok = use_weight(node, node->src[0], moe::SlabPart::kWeight, op); !ok) return ok;
        if (!same_ids(node->src[2])) return refuse(node, "two different id tensors");
        if (const auto known = find(node->src[1])) {
            op.a = *known;
        } else {
            if (out_.input != nullptr) return refuse(node, "two different inputs");
            out_.input = node->src[1];
            registers_.emplace_back(out_.input, 0);
            op.a = 0;
        }
        return push(node, op);
    }

    Status bias(ggml_tensor* node) {
        const auto a = find(node->src[0]);
        if (!a || !same_ids(node->src[2])) return refuse(node, "not on the chain");
        moe::ProgramOp op;
        op.kind = moe::OpKind::kAddBias;
        op.a = *a;
        if (Status ok = use_weight(node, node->src[1], moe::SlabPart::kBias, op); !ok) return ok;
        return push(node, op);
    }

    Status row_wise(ggml_tensor* node, moe::OpKind kind, uint8_t sub,
                    const ggml_tensor* second = nullptr) {
        const auto a = find(node->src[0]);
        const auto b = second == nullptr ? std::optional<uint8_t>(uint8_t{0}) : find(second);
        if (!a || !b) return refuse(node, "not on the chain");
        if (second != nullptr && !ggml_are_same_shape(node->src[0], second))
            return refuse(node, "broadcast");
        moe::ProgramOp op;
        op.kind = kind;
        op.sub = sub;
        op.a = *a;
        op.b = *b;
        if (kind == moe::OpKind::kScale || kind == moe::OpKind::kClamp) {
            op.f0 = param_f32(node, 0);
            op.f1 = param_f32(node, 1);
        }
        return push(node, op);
    }

    Status glu(ggml_tensor* node) {
        const auto kind = glu_kind(node);
        if (!kind || node->src[1] == nullptr) return refuse(node, "GLU form is not on the list");
        if (Status ok = row_wise(node, moe::OpKind::kGlu, *kind, node->src[1]); !ok) return ok;
        const auto form = static_cast<moe::GluKind>(*kind);
        if (form == moe::GluKind::kSwigluOai || form == moe::GluKind::kSwigluClamp) {
            out_.program.ops.back().f0 = form == moe::GluKind::kSwigluOai ? param_f32(node, 2) : 0;
            out_.program.ops.back().f1 = param_f32(node, 3);
        }
        return {};
    }

    Status mul(ggml_tensor* node) {
        const ggml_tensor* gather = node->src[1];
        const ggml_tensor* scale = scale_source(gather);
        if (scale == nullptr) return row_wise(node, moe::OpKind::kMul, 0, node->src[1]);
        const auto a = find(node->src[0]);
        if (!a || gather->op != GGML_OP_GET_ROWS || !same_ids(gather->src[1])) {
            return refuse(node, "not on the chain");
        }
        moe::ProgramOp op;
        op.kind = moe::OpKind::kMulScale;
        op.a = *a;
        if (Status ok =
                use_weight(node, const_cast<ggml_tensor*>(scale), moe::SlabPart::kScale, op);
            !ok) {
            return ok;
        }
        return push(node, op);
    }

    Status view(ggml_tensor* node) {
        const auto a = find(node->src[0]);
        if (!a || *a == 0)
            return {};  // shapes ids, scales or something of a neighbour: not a value of the chain
        const ggml_tensor* from = node->src[0];
        if (ggml_are_same_shape(node, from) && ggml_are_same_stride(node, from)) {
            registers_.emplace_back(node, *a);
            return {};
        }
        if (out_.output != nullptr && find(out_.output) == a &&
            out_.program.ops.back().kind == moe::OpKind::kMatMul &&
            out_.program.ops.back().role == moe::SlabRole::kDown) {
            return {};  // views of the result, for the adds that follow on the CPU
        }
        const bool columns = node->ne[1] == from->ne[1] && node->ne[2] == from->ne[2] &&
                             node->nb[1] == from->nb[1] && node->nb[2] == from->nb[2] &&
                             node->nb[0] == sizeof(float) && node->ne[3] == 1;
        size_t offset = 0;
        std::memcpy(&offset, node->op_params, sizeof(offset));
        if (node->op != GGML_OP_VIEW || !columns || offset % sizeof(float) != 0) {
            return refuse(node, "view is not a range of columns");
        }
        moe::ProgramOp op;
        op.kind = moe::OpKind::kView;
        op.a = *a;
        op.view_begin = static_cast<uint32_t>(offset / sizeof(float));
        op.view_count = static_cast<uint32_t>(node->ne[0]);
        return push(node, op);
    }

    Captured out_;
    std::vector<std::pair<const ggml_tensor*, uint8_t>> registers_;  // few: searched in order
    std::vector<const ggml_tensor*> flagged_;
};

}  // namespace

Result<std::vector<Captured>> capture(ggml_cgraph* graph) {
    std::vector<Captured> done;
    std::optional<BankCapture> bank;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor* node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_MUL_MAT_ID) {
            const auto name = weight_of(node->src[0]);
            if (!name)
                return fail(Errc::kUnsupported,
                            std::string(node->name) + ": product of other weights");
            if (bank && bank->layer() != name->key) {
                auto captured = bank->finish(graph);
                if (!captured) return tl::unexpected(captured.error());
                done.push_back(std::move(*captured));
                bank.reset();
            }
            if (!bank) bank.emplace(name->key);
        }
        if (!bank) {
            if (is_view(node) || node->op == GGML_OP_NONE || scale_source(node) != nullptr)
                continue;
            return fail(Errc::kUnsupported, std::string(node->name) + ": comes before any product");
        }
        if (Status ok = bank->add(node); !ok) return tl::unexpected(ok.error());
    }
    if (!bank) return done;
    auto captured = bank->finish(graph);
    if (!captured) return tl::unexpected(captured.error());
    done.push_back(std::move(*captured));
    return done;
}

bool is_expert_op(const ggml_tensor* node) {
    switch (node->op) {
        case GGML_OP_MUL_MAT_ID: {
            const auto name = weight_of(node->src[0]);
            return name && name->part == moe::SlabPart::kWeight;
        }
        case GGML_OP_ADD_ID: {
            const auto name = weight_of(node->src[1]);
            return name && name->part == moe::SlabPart::kBias;
        }
        case GGML_OP_REPEAT:
        case GGML_OP_GET_ROWS:
            return scale_source(node) != nullptr;
        case GGML_OP_MUL:
            if (scale_source(node->src[1]) != nullptr && origin(node->src[0], 0) != Origin::kOther)
                return true;
            return origin(node->src[0], 0) == Origin::kFirst &&
                   origin(node->src[1], 0) == Origin::kFirst;
        case GGML_OP_ADD:
            return origin(node->src[0], 0) == Origin::kFirst &&
                   origin(node->src[1], 0) == Origin::kFirst;
        case GGML_OP_UNARY:
        case GGML_OP_GLU:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_SQR:
            return origin(node->src[0], 0) == Origin::kFirst;
        default:
            return false;
    }
}

}  // namespace kvasir::plugin
