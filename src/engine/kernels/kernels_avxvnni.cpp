// Compiled with AVX2, FMA, F16C and AVX-VNNI: see cmake/kernels.cmake.
#include "engine/kernels/lanes_avxvnni.hpp"
#include "engine/kernels/sets.hpp"

namespace kvasir::engine::kernels {

const Kernels kKernelsAvxVnni = make_kernels<AvxVnni>("avxvnni");

}  // namespace kvasir::engine::kernels
