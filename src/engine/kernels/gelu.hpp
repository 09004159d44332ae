// GELU as ggml computes it: through a table of its values at every f16.
//
// Used by KernelPlan's element-wise steps. Thread: any; the table is made at the first call.
// Owns: 128 KiB.
#pragma once

#include <cstdint>

namespace kvasir::engine::kernels {

// y[i] = gelu(x[i]), times g[i] unless g is null. Outside +-10: 0 and x.
void gelu(uint32_t count, const float* x, const float* g, float* y);

}  // namespace kvasir::engine::kernels
