// The fused kernels of kernels/fused.h on a GPU, with the same bits: lists of tensors, however
// many, in one launch (unscaling: two). As in kernels/cuda/kernels.h, functions only launch.
//
// Tensors are aligned to their elements; 16-byte accesses are used where one is aligned to 16
// bytes. Nothing here is read by the host: results stay in device memory, and factors may come from
// there.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/fused.h"

namespace pycoll::cuda {

// What a kernel reads of a tensor.
struct TensorRow {
  void* values;
  const void* source;  // of casts
  uint64_t count;      // 1 at least
  uint64_t first_chunk;
  DType dtype;
  DType from;  // of casts
};

// A list in device memory. It may be used again for as long as the tensors stay where they are.
struct TensorTable {
  const TensorRow* rows = nullptr;  // in device memory
  uint32_t tensors = 0;
  uint64_t chunks = 0;
  uint32_t most_blocks = 2048;  // of 128 threads; results do not depend on it
};

// The rows to copy there, of lists whose addresses are those of device memory. Tensors without
// elements are left out. `table` gets what there is to know of them but where they are copied to.
std::vector<TensorRow> rows_of(const TensorList& list, TensorTable* table);
std::vector<TensorRow> rows_of(const CastList& list, TensorTable* table);

// `found_inf`, where not nullptr, is set to 1 where some result is infinite or NaN and left alone
// otherwise: device memory, as torch's GradScaler has it.

struct CastListCall {
  TensorTable table;
  float scale = 1.0f;
  float* found_inf = nullptr;
};
cudaError_t cast_list(const CastListCall& call, cudaStream_t stream);

// A number, or, where there is `device_value`, what that is when the kernel runs.
struct Factor {
  double value = 1.0;
  const float* device_value = nullptr;
};

struct UnscaleListCall {
  TensorTable table;
  Factor factor;
  double* chunk_sums = nullptr;      // room for table.chunks of them, in device memory
  double* sum_of_squares = nullptr;  // device memory
  float* found_inf = nullptr;
};
cudaError_t unscale_list(const UnscaleListCall& call, cudaStream_t stream);

struct MultiplyListCall {
  TensorTable table;
  Factor factor;
};
cudaError_t multiply_list(const MultiplyListCall& call, cudaStream_t stream);

// Multiplies by min(1, max_norm / (sqrt(sum_of_squares) + 1e-6)); a factor of 1 leaves memory
// alone.
struct ClipListCall {
  TensorTable table;
  const double* sum_of_squares = nullptr;  // device memory
  double max_norm = 1.0;
};
cudaError_t clip_list(const ClipListCall& call, cudaStream_t stream);

}  // namespace pycoll::cuda
