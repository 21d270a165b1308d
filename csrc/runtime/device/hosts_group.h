// Several hosts. An all_reduce of some size is summed inside each host on its GPUs, then between
// hosts by the CPU transport, out of and into pinned memory, then gathered inside each host: each
// way, one vector's worth of data crosses between two hosts, however many ranks they have. All else
// goes through host memory as a whole (StagedGroup).
//
// Over a codec, where hosts have as many ranks each, it is the same, and the part between hosts
// alone is encoded, on the GPU: as runtime/host_codec_call.h has it.
//
// Inside of a host it is a group of its own, on whatever path its GPUs have; between hosts, an
// all_reduce of those ranks that have the same share of the vector. A share goes out, over the wire
// and back in pieces, so that the copies go on while the wire is busy.
#pragma once

#include <functional>
#include <memory>

#include "runtime/device/staged_group.h"

namespace pycoll::cuda {

class HostsGroup final : public StagedGroup {
 public:
  // Makes the group of this host's ranks, which call it together.
  using OpenHere =
      std::function<std::shared_ptr<DeviceGroup>(const std::shared_ptr<Communicator>& here)>;

  HostsGroup(GroupSeed seed, OpenHere open);
  ~HostsGroup() override;

  void connect() override;

  const char* path() const override { return "hosts"; }

 protected:
  using StagedGroup::launch;  // messages
  void launch(const CallRequest& request, cudaStream_t stream) override;
  void launch_over_codec(const CodecRequest& request, cudaStream_t stream) override;
  std::optional<Error> reported() override;
  void ended() override;

 private:
  const OpenHere open_;
  // How a call is summed.
  struct Sum {
    DType dtype;      // of partial sums
    ReduceOp inside;  // inside of hosts, as between them:
    ReduceOp between;
    bool divides = false;  // when it is complete
  };
  struct Part {
    const std::byte* input;
    std::byte* output;
    uint64_t count;
  };

  std::optional<Sum> sum_for(const CallRequest& request) const;
  void all_reduce(const CallRequest& request, const Sum& sum, const Part& part,
                  cudaStream_t stream);
  Block share_of(std::byte* vector, uint64_t count, size_t element, int local) const;
  VectorView shares_of(std::byte* vector, uint64_t count, size_t element) const;
  void scatter(const CallRequest& request, const Sum& sum, std::byte* from, std::byte* to,
               uint64_t count, cudaStream_t stream) const;
  void gather(const CallRequest& request, std::byte* vector, uint64_t count,
              cudaStream_t stream) const;
  void sum_between(const CallRequest& request, const Sum& sum, const Block& share,
                   cudaStream_t stream);
  std::function<void(CallRequest)> wire() const;
  void divide(DType dtype, const Block& share, cudaStream_t stream) const;
  uint64_t piece_for(uint64_t bytes) const;

  std::vector<int> here_;     // the ranks of this host
  std::vector<int> between_;  // those that have this rank's share; none: it has no share
  int local_ = 0;             // this rank's place in here_
  int shares_ = 0;            // as many as the smallest host has ranks
  bool alike_ = false;        // all hosts have as many, two or more
  std::shared_ptr<Communicator> wire_;
  std::shared_ptr<DeviceGroup> inside_;
  PinnedMemory pieces_;  // [HostWork::kSlots]
  KeptMemory<DeviceMemory> scratch_;
};

}  // namespace pycoll::cuda
