#include "kernels/cpu/fused_impl.h"
#include "kernels/cpu/fused_table.h"

namespace pycoll {
constinit const FusedKernels fused_kernels_baseline = kFusedKernels;
}  // namespace pycoll
