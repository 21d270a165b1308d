// Calls of the kernels of kernels/fused.h on a GPU. Nothing is read by the host: results stay in
// device memory, and factors may come from there.
#pragma once

#include "kernels/fused.h"

namespace pycoll {

// Where a call runs, and what it needs of device memory beside the tensors.
struct FusedPlace {
  int device = 0;
  void* stream = nullptr;
  void* room = nullptr;        // fused_room() bytes, aligned to 16; free once the call is over
  float* found_inf = nullptr;  // set to 1 where a result is infinite or NaN, else left alone
};

// Of a list of so many tensors that are cut into so many chunks (kernels/fused.h).
constexpr uint64_t fused_room(uint64_t tensors, uint64_t chunks) {
  return tensors * 64 + chunks * sizeof(double);
}
constexpr uint64_t chunks_of(uint64_t count) {
  return (count + kSumChunk - 1) / kSumChunk;
}

// A number, or what is at an address of the device when the call runs.
struct DeviceFactor {
  double value = 1;
  const float* address = nullptr;
};

}  // namespace pycoll
