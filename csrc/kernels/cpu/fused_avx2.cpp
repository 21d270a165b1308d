// cmake/kernels.cmake sets the flags of this file on x86; elsewhere there are no kernels.
#include "kernels/cpu/fused_table.h"
#if defined(__AVX2__) && defined(__F16C__)
#include "kernels/cpu/fused_impl.h"
#define PYCOLL_KERNELS kFusedKernels
#else
#define PYCOLL_KERNELS \
  {}
#endif

namespace pycoll {
constinit const FusedKernels fused_kernels_avx2 = PYCOLL_KERNELS;
}  // namespace pycoll
