// Reading the expert program out of llama.cpp's graph.
//
// The scheduler hands the backend the expert FFN of a MoE layer as ggml nodes. capture() recognises
// the row-wise chain between the first products and the last one as a moe::Program plus the tensors
// it works on, or says why not; whatever is not understood is computed on the backbone as the graph
// it is.
//
// Thread: reentrant. Owns: nothing; tensor pointers are the graph's.
#pragma once

#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "engine/weights.hpp"
#include "moe/program.hpp"

struct ggml_cgraph;
struct ggml_tensor;

namespace kvasir::plugin {

struct Captured {
    LayerKey layer;
    moe::Program program;
    engine::BankWeights::Tensors weights = {};  // null where the program uses none
    ggml_tensor* input = nullptr;               // f32 [n_in, rows per token (1 or k), tokens]
    ggml_tensor* ids = nullptr;                 // i32 [k, tokens], any strides
    ggml_tensor* output = nullptr;              // f32 [n_out, k, tokens]
};

// Captures every bank of the graph, in order. Errors: kUnsupported, naming the node.
Result<std::vector<Captured>> capture(ggml_cgraph* graph);

// Should our backend take this node? True for MUL_MAT_ID with expert weights, and for row-wise
// operations between a first product and a last one (the rule that keeps weighting and adds with
// the CPU).
bool is_expert_op(const ggml_tensor* node);

}  // namespace kvasir::plugin
