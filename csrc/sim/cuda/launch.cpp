// Kernels onto streams, and what functions say about themselves.
#include "sim/cuda/device_model.h"
#include "sim/cuda/enqueue.h"
#include "sim/cuda/runtime.h"

namespace pycoll::sim {
namespace cuda {
namespace {

int shared_limit(const Runtime& runtime, const void* function) {
  const auto found = runtime.shared_limits.find(function);
  return found == runtime.shared_limits.end() ? kSharedPerBlock : found->second;
}

cudaError_t launch(const Call& call, cudaStream_t on, const device::LaunchShape& shape,
                   std::function<void()> body, const void* function) {
  const auto stream = call.runtime.stream(on, call.thread);
  if (stream == nullptr || stream->device != call.thread.device) {
    return cudaErrorInvalidResourceHandle;
  }
  if (shape.shared_bytes > static_cast<size_t>(shared_limit(call.runtime, function))) {
    return cudaErrorInvalidValue;
  }
  Grid grid;
  grid.grid = shape.grid;
  grid.block = shape.block;
  grid.shared_bytes = shape.shared_bytes;
  if (!why_invalid(grid).empty()) return cudaErrorInvalidConfiguration;
  Plan plan;
  plan.kind = Kind::kernel;
  plan.kernel = std::make_shared<const Kernel>(
      Kernel{shape.grid, shape.block, shape.shared_bytes, std::move(body)});
  return call.runtime.submit(*stream, std::move(plan));
}

cudaError_t set_attribute(const Call& call, const void* function, cudaFuncAttribute attribute,
                          int value) {
  if (function == nullptr) return cudaErrorInvalidDeviceFunction;
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  if (value < 0 || value > kSharedPerBlockOptin) return cudaErrorInvalidValue;
  call.runtime.shared_limits[function] = value;
  return cudaSuccess;
}

}  // namespace
}  // namespace cuda

cudaError_t enqueue_kernel(cudaStream_t stream, const device::LaunchShape& shape,
                           std::function<void()> body, const void* function) {
  return cuda::api("cudaLaunchKernelExC", cuda::Rule::usual, [&](const cuda::Call& call) {
    return cuda::launch(call, stream, shape, std::move(body), function);
  });
}

}  // namespace pycoll::sim

using namespace pycoll::sim::cuda;

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return set_attribute(call, function, attribute, value); });
}

// Registers and static shared memory are not known here; they read as none.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    *attributes = {};
    attributes->maxThreadsPerBlock = kThreadsPerBlock;
    attributes->maxDynamicSharedSizeBytes = shared_limit(call.runtime, function);
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int block_threads, size_t shared_bytes) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    if (function == nullptr) return cudaErrorInvalidDeviceFunction;
    if (blocks == nullptr) return cudaErrorInvalidValue;
    *blocks = occupancy(call.runtime.settings, block_threads, shared_bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function,
                                                                   int block_threads,
                                                                   size_t shared_bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_threads,
                                                       shared_bytes);
}

// What nvcc's code calls. There is no device code in a build for the simulator that they could run;
// they are here so that the symbols of both builds can be compared.
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return api(__func__, Rule::usual, [](const Call&) { return cudaErrorInvalidDeviceFunction; });
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return api(__func__, Rule::usual, [](const Call&) { return cudaErrorInvalidDeviceFunction; });
}
