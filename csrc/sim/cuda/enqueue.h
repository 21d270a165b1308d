// How kernels get onto streams of the simulated CUDA runtime: csrc/device/launch.cuh calls this,
// and nothing else does.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "device/launch_shape.h"

namespace pycoll::sim {

// Puts a kernel on the stream, or into the graph that the stream is capturing. `body` is run once
// by every CUDA thread, as a fiber; it owns copies of its arguments, as a launch makes them.
// `function` is the kernel itself, by which cudaFuncSetAttribute knows it.
//
// cudaErrorInvalidConfiguration: no or too many threads or blocks. cudaErrorInvalidValue: more
// dynamic shared memory than the function may have. cudaErrorInvalidResourceHandle: no such stream,
// or one of another device than the current.
cudaError_t enqueue_kernel(cudaStream_t stream, const device::LaunchShape& shape,
                           std::function<void()> body, const void* function = nullptr);

}  // namespace pycoll::sim
