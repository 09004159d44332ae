// For every 64-bit ARM processor: armv8.0 with NEON.
#include "engine/kernels/dots.hpp"
#include "engine/kernels/lanes_neon.hpp"
#include "engine/kernels/sets.hpp"

namespace kvasir::engine::kernels {

const Kernels kKernelsNeon = make_kernels<Neon>("neon");

}  // namespace kvasir::engine::kernels
