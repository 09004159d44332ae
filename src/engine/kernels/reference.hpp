// The definition: what a product of a weight row and an activation row is, operation by operation.
//
// Used where a processor has none of the vector versions, and by the tests, which hold every vector
// version to it and it to ggml. docs/numerics.md says the same in prose. Thread: pure functions.
#pragma once

#include "engine/kernels/weights.hpp"

namespace kvasir::engine::kernels {

// weights: row_bytes(type, width) bytes; row: of row_kind(type), width values. width is a multiple
// of block_width(type).
float reference_dot(WeightType type, uint32_t width, const uint8_t* weights, const Row& row);
// kIq4Xs where takes_panel().
float reference_dot_panel(uint32_t width, const uint8_t* weights, const Row& row);

}  // namespace kvasir::engine::kernels
