// The one way to start a kernel. Together with device.cuh this is all that knows nvcc from a host
// compiler, so <<<>>> appears nowhere else.
#pragma once

#include <cuda_runtime_api.h>

#include "device/launch_shape.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "sim/cuda/enqueue.h"
#endif

namespace pycoll::device {

// Runs kernel(args...) on `stream` of the current device, in the order of that stream. Arguments
// are converted to the kernel's parameter types and copied before the call returns. Returns what
// CUDA says of the launch; errors of the kernel itself come with later calls, as always.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                   Arguments... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "one argument for each parameter");
#if defined(__CUDACC__)
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
#else
  return sim::enqueue_kernel(
      stream, shape, [=] { kernel(static_cast<Parameters>(arguments)...); },
      reinterpret_cast<const void*>(kernel));
#endif
}

}  // namespace pycoll::device
