// cmake/kernels.cmake sets the flags of this file on x86; elsewhere there are no kernels.
#include "kernels/cpu/fused_table.h"
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels/cpu/fused_impl.h"
#define PYCOLL_KERNELS kFusedKernels
#else
#define PYCOLL_KERNELS \
  {}
#endif

namespace pycoll {
constinit const FusedKernels fused_kernels_avx512 = PYCOLL_KERNELS;
}  // namespace pycoll
