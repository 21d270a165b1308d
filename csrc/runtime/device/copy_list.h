// Copies on a device, many in one kernel.
#pragma once

#include "kernels/cuda/kernels.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {

// Copies that overlap nothing, in any order; launched when there are as many as a kernel takes, and
// by launch().
class CopyList {
 public:
  explicit CopyList(cudaStream_t stream) : stream_(stream) {}

  void add(const void* from, void* to, uint64_t bytes) {
    if (bytes == 0 || from == to) return;
    if (call_.copies == kMaxRanks) launch();
    call_.src[call_.copies] = from;
    call_.dst[call_.copies] = to;
    call_.bytes[call_.copies++] = bytes;
  }
  void launch() {
    if (call_.copies > 0) require(copy_many(call_, stream_), "copying between ranks");
    call_ = {};
  }

 private:
  CopyManyCall call_;
  cudaStream_t stream_;
};

}  // namespace pycoll::cuda
