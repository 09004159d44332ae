// Compiled with AVX-512 F, BW, VL, DQ and VNNI: see cmake/kernels.cmake.
#include "engine/kernels/pairs_avx512.hpp"
#include "engine/kernels/sets.hpp"

namespace kvasir::engine::kernels {

const Kernels kKernelsAvx512 = make_kernels<Avx512>("avx512");

}  // namespace kvasir::engine::kernels
