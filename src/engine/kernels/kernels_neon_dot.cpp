// Compiled for armv8.2 with the dot product: see cmake/kernels.cmake.
#include "engine/kernels/dots.hpp"
#include "engine/kernels/lanes_neon.hpp"
#include "engine/kernels/sets.hpp"

namespace kvasir::engine::kernels {

const Kernels kKernelsNeonDot = make_kernels<Neon>("neon-dot");

}  // namespace kvasir::engine::kernels
