// What the executor kernel is launched with, and who launches it.
#pragma once

#include "kernels/cuda/any_op.h"
#include "kernels/cuda/kernels.h"

namespace pycoll::cuda {

constexpr int kMaxThreads = 512;  // a block

// A Vector cut into chunks, in the elements of the kernel (bytes where nothing is reduced, the
// parts of complex numbers).
struct CutVector {
  std::byte* block[kMaxBlocks];
  uint64_t count[kMaxBlocks];
  uint64_t chunk;  // of the only block, but for its end; 0: chunk k is block k
};

template <class Parameters>
struct ExecutorArguments {
  GroupView group;
  Call call;
  ProgramHeader header;
  ProgramPlan plan;
  CutVector input;
  CutVector output;
  const ProgramStep* steps;
  uint64_t scratch_stride;  // bytes a block
  Parameters arithmetic;
};

// Elements as kernels count them.
struct Elements {
  uint32_t size = 1;      // bytes of a value
  uint32_t acc_size = 1;  // of a partial sum
  uint32_t parts = 1;     // of them a caller's element
};

// Which arithmetic runs a call.
enum class Route : uint8_t { unsupported, move, float32, float16, bfloat16, any_op };
Route route_of(const Arithmetic& arithmetic);
Elements elements_of(const Arithmetic& arithmetic);

}  // namespace pycoll::cuda
