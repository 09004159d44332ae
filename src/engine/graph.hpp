// Turning an expert program into a ggml graph for a given number of pairs.
//
// Used by expert_engine.cpp only. Thread: as the engine. Owns: the graph's context; tensors live in
// the arena of the engine.
#pragma once

#include <vector>

#include "engine/expert_engine.hpp"
#include "ggml-cpp.h"
#include "ggml.h"

namespace kvasir::engine {

// One row for all pairs (decode), or one gathered row a pair.
enum class RowLayout : uint8_t { kShared, kPerPair };

struct PairGraph {
    struct ScaleLeaf {
        ggml_tensor* leaf;          // f32, one value a pair
        const ggml_tensor* source;  // f32, one value an expert
    };
    ggml_context_ptr context;
    ggml_cgraph* graph = nullptr;
    ggml_tensor* input = nullptr;   // [n_in, 1, 1] or [n_in, 1, pairs]
    ggml_tensor* ids = nullptr;     // [pairs, 1] or [1, pairs]
    ggml_tensor* output = nullptr;  // pairs rows
    std::vector<ScaleLeaf> scales;
    uint64_t arena_bytes = 0;  // what place() needs
};

// Builds the graph without memory. `pairs` >= 1.
PairGraph build_graph(const Bank& bank, uint32_t row_type, RowLayout layout, uint32_t pairs);
// Gives every tensor its place in `buffer`, which must have arena_bytes.
void place(PairGraph& graph, ggml_backend_buffer* buffer);

}  // namespace kvasir::engine
