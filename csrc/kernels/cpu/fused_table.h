// The fused kernels of each instruction set.
#pragma once

#include "kernels/fused.h"

namespace pycoll {

extern const FusedKernels fused_kernels_baseline;
extern const FusedKernels fused_kernels_avx2;    // empty unless built for x86
extern const FusedKernels fused_kernels_avx512;  // empty unless built for x86

}  // namespace pycoll
