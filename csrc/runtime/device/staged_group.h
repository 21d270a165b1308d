// Everything that no other path serves: GPUs of a host that do not reach each other, too many
// ranks. Vectors go through pinned host memory, and calls are run there by a CPU communicator of
// the group's own, by its HostWork.
#pragma once

#include <vector>

#include "runtime/device/cuda_group.h"
#include "runtime/device/host_work.h"
#include "runtime/device/staged_carrier.h"

namespace pycoll::cuda {

class StagedGroup : public CudaGroup {
 public:
  explicit StagedGroup(GroupSeed seed);
  ~StagedGroup() override { finish(); }

  void connect() override;

  const char* path() const override { return "staged"; }

 protected:
  void launch(const CallRequest& request, cudaStream_t stream) override;
  void launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) override;
  void launch_over_codec(const CodecRequest& request, cudaStream_t stream) override;
  std::optional<Error> reported() override { return host_.failure(); }
  void ended() override;
  bool times_out_itself() const override { return true; }
  void release_waits() override { host_.release(); }

  const Driver& driver() const { return driver_; }
  HostWork& host() { return host_; }
  // Codes among the ranks of a CPU communicator of this group's; `run` as in StagedCarrier.
  StagedCarrier carrier_among(const Communicator& ranks, std::function<void(CallRequest)> run);

 private:
  const Driver driver_;
  // The same ranks. What the caller runs on the group's communicator comes when the caller makes
  // it, and this when streams come to it: two orders.
  std::shared_ptr<Communicator> staging_;  // from connect() on
  KeptMemory<PinnedMemory> pinned_;        // of a call, until the next one on the stream
  PinnedSlots codes_;
  HostWork host_;  // goes first
};

}  // namespace pycoll::cuda
