// Kernels of mixed precision over lists of tensors: each does in one pass over memory what takes
// several of elementwise operations.
//
// What holds for all of them:
//   * a value is multiplied in its arithmetic type, which is float64 for float64 and float32 for
//     float32, float16 and bfloat16; the factor is rounded to that type first, the product to the
//     tensor's type, once;
//   * every NaN that is written is the quiet one without sign and payload;
//   * the same bits from every instruction set, at every alignment, and on a GPU
//     (kernels/cuda/fused.h).
//
// The order of sums of squares, so that they have the same bits too. It suits vectors of any width
// and warps of a GPU, which take a chunk each. Tensors are cut into chunks of
// kSumChunk elements (the last of each may be shorter). Element i of a chunk goes to partial sum
// i % kSumLanes of the chunk, in the order of i. Of the kSumLanes sums the upper half is added to
// the lower half, until one is left. Chunks of all tensors, in the order of the list, are added by
// the same rule: chunk k to partial sum k % kSumLanes. Everything in float64. Tensors without
// elements have no chunks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "kernels/reduce.h"

namespace pycoll {

constexpr uint32_t kSumLanes = 256;
constexpr uint32_t kSumChunk = 4096;
static_assert(kSumChunk % kSumLanes == 0);

// Dense, at any alignment. Tensors of a list have no memory in common.
struct Tensor {
  DType dtype;  // float32, float16, bfloat16 or float64
  void* values;
  size_t count;
};
struct TensorList {
  const Tensor* tensors;
  size_t count;
};
bool can_unscale(DType dtype);

struct Unscaled {
  bool found_inf;         // some value is infinite or NaN, as it was or as it became
  double sum_of_squares;  // of the values as they are stored; infinite where float64 overflows
};

// Between float32, float16 and bfloat16 (can_encode() of kernels/codec.h). `target` may be exactly
// `source` where the types have one size; other overlap is not allowed.
struct CastTensor {
  DType from;
  const void* source;
  DType to;
  void* target;
  size_t count;
};
struct CastList {
  const CastTensor* tensors;
  size_t count;
};

// Dtypes are checked by the caller.
struct FusedKernels {
  // target[i] = source[i] * scale. True when a result is infinite or NaN. A source that is gives
  // such a result, whatever the scale.
  bool (*cast)(const CastList& list, float scale);
  // x *= factor, for every x of the list.
  Unscaled (*unscale)(const TensorList& list, double factor);
  void (*multiply)(const TensorList& list, double factor);
};

// `isa` must be available.
const FusedKernels& fused_kernels(Isa isa);

}  // namespace pycoll
