// Q8_K rows: how ggml's k-quant products quantise their activations, here once per row on the
// backbone.
//
// Used by ExpertEngine::quantise, so that a request carries 292 bytes per 256 values in place of
// 1,024. The kernels' quantiser, in the layout that travels; q8k_test.cpp compares it with ggml's
// quantize_row_q8_K. Layout of a block of 256 values: f32 d, 256 x i8 q, 16 x i16 sums of
// 16 q each; value = d * q.
//
// Thread: reentrant.
#pragma once

#include <cstdint>

namespace kvasir::engine {

constexpr uint32_t kQ8KBlock = 256;
constexpr uint32_t kQ8KBlockBytes = 4 + kQ8KBlock + 2 * (kQ8KBlock / 16);

// `width` must be a multiple of kQ8KBlock; `out` has width / 256 * kQ8KBlockBytes bytes, any
// alignment.
void quantise_q8k(const float* row, uint32_t width, uint8_t* out);

}  // namespace kvasir::engine
