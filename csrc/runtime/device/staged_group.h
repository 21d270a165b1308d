// Everything that no other path serves: several hosts, GPUs that do not reach each other. Vectors
// go through pinned host memory and the CPU transport; calls return when they are over.
#pragma once

#include "runtime/device/cuda_group.h"

namespace pycoll::cuda {

class StagedGroup final : public CudaGroup {
 public:
  explicit StagedGroup(GroupSeed seed) : CudaGroup(std::move(seed)) {}
  ~StagedGroup() override { finish(); }

  const char* path() const override { return "staged"; }

 protected:
  void launch(const CallRequest& request, cudaStream_t stream) override;
  void launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) override;
  bool can_be_captured() const override { return false; }

 private:
  // Room for so many bytes, until the next call.
  std::byte* room(size_t bytes);

  PinnedMemory pinned_;
};

}  // namespace pycoll::cuda
