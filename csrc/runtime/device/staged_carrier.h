// Codes that cross PCIe and a CPU transport as codes.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/communicator.h"
#include "runtime/device/code_carrier.h"
#include "runtime/device/host_work.h"
#include "runtime/device/kept_memory.h"

namespace pycoll::cuda {

// Of the slots of a HostWork.
using PinnedSlots = std::array<KeptMemory<PinnedMemory>, HostWork::kSlots>;

class StagedCarrier final : public CodeCarrier {
 public:
  struct Parts {
    HostWork& work;
    PinnedSlots& memory;
    const Communicator& ranks;
    // Runs a call among them, in the thread of the work.
    std::function<void(CallRequest)> run;
    bool captured;
    uint64_t portion;
  };
  explicit StagedCarrier(Parts parts) : parts_(std::move(parts)) {}

  int world_size() const override { return parts_.ranks.world_size(); }
  int rank() const override { return parts_.ranks.rank(); }
  size_t slots() const override { return HostWork::kSlots; }
  uint64_t portion() const override { return parts_.portion; }
  void begin(size_t slot, const CallRequest& call, cudaStream_t stream) override;
  void end(size_t slot, cudaStream_t stream) override;

 private:
  struct Copy {
    const std::byte* from;
    std::byte* to;
    uint64_t bytes;
  };
  const Parts parts_;
  std::array<std::vector<Copy>, HostWork::kSlots> back_;  // to the device, of calls under way
};

}  // namespace pycoll::cuda
