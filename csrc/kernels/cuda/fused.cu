#include <algorithm>

#include "device/launch.cuh"
#include "kernels/cuda/fused.cuh"

namespace pycoll::cuda {
namespace {

bool is_whole(const TensorTable& table) {
  return table.tensors == 0 || (table.rows != nullptr && table.most_blocks > 0);
}

// A warp for each chunk, as far as blocks go.
device::LaunchShape grid_for(const TensorTable& table) {
  const uint64_t blocks = (table.chunks + kWarpsOfBlock - 1) / kWarpsOfBlock;
  return {dim3(static_cast<unsigned>(std::min<uint64_t>(blocks, table.most_blocks))),
          dim3(kFusedThreads)};
}

cudaError_t multiply(const MultiplyArguments& arguments, cudaStream_t stream) {
  if (!is_whole(arguments.table)) return cudaErrorInvalidValue;
  if (arguments.table.chunks == 0) return cudaSuccess;
  return device::launch(&multiply_list_kernel, grid_for(arguments.table), stream, arguments);
}

}  // namespace

cudaError_t cast_list(const CastListCall& call, cudaStream_t stream) {
  if (!is_whole(call.table)) return cudaErrorInvalidValue;
  if (call.table.chunks == 0) return cudaSuccess;
  return device::launch(&cast_list_kernel, grid_for(call.table), stream, call);
}

cudaError_t unscale_list(const UnscaleListCall& call, cudaStream_t stream) {
  const bool has_room = call.chunk_sums != nullptr || call.table.chunks == 0;
  if (!is_whole(call.table) || !has_room || call.sum_of_squares == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (call.table.chunks > 0) {
    const cudaError_t error =
        device::launch(&unscale_list_kernel, grid_for(call.table), stream, call);
    if (error != cudaSuccess) return error;
  }
  return device::launch(&sum_chunks_kernel, {dim3(1), dim3(kFusedThreads)}, stream, call.chunk_sums,
                        call.table.chunks, call.sum_of_squares);
}

cudaError_t multiply_list(const MultiplyListCall& call, cudaStream_t stream) {
  return multiply({call.table, call.factor, nullptr, 0}, stream);
}

cudaError_t clip_list(const ClipListCall& call, cudaStream_t stream) {
  if (call.sum_of_squares == nullptr || !(call.max_norm >= 0)) return cudaErrorInvalidValue;
  return multiply({call.table, {}, call.sum_of_squares, call.max_norm}, stream);
}

}  // namespace pycoll::cuda
