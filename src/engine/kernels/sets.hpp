// The kernel sets that may be in a build; which of them are is a matter of the processor it is for.
// Used by kernels.cpp only. Constants.
#pragma once

#include "engine/kernels/kernels.hpp"

namespace kvasir::engine::kernels {

extern const Kernels kKernelsAvx512;
extern const Kernels kKernelsAvxVnni;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsNeonDot;
extern const Kernels kKernelsNeon;

}  // namespace kvasir::engine::kernels
