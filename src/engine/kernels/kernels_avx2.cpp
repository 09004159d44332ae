// Compiled with AVX2, FMA and F16C: see cmake/kernels.cmake.
#include "engine/kernels/pairs_avx2.hpp"
#include "engine/kernels/sets.hpp"

namespace kvasir::engine::kernels {

const Kernels kKernelsAvx2 = make_kernels<Avx2>("avx2");

}  // namespace kvasir::engine::kernels
