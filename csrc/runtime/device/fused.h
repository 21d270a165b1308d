// The fused kernels of kernels/cuda/fused.h for callers outside of the GPU's library.
#pragma once

#include "runtime/device/fused_calls.h"

namespace pycoll::cuda {

// As DeviceLibrary has them.
void cast(const CastList& list, float scale, const FusedPlace& place);
void unscale(const TensorList& list, const DeviceFactor& factor, double* sum_of_squares,
             const FusedPlace& place);
void multiply(const TensorList& list, const DeviceFactor& factor, const FusedPlace& place);
void clip(const TensorList& list, const double* sum_of_squares, double max_norm,
          const FusedPlace& place);

}  // namespace pycoll::cuda
