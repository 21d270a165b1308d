// One GPU a rank, and all of them reach each other's memory: kernels that wait for their peers'
// kernels (kernels/cuda/kernels.h).
#pragma once

#include <map>
#include <tuple>

#include "kernels/cuda/kernels.h"
#include "runtime/device/cuda_group.h"
#include "runtime/device/peer_choice.h"

namespace pycoll::cuda {

// What all ranks use, from what all know: a grid of the group has room on every device beside one
// of messages. nullopt: the smallest device is too small for that.
std::optional<Geometry> geometry_of(const Peers& peers, const Config& config);

class PeerGroup final : public CudaGroup {
 public:
  PeerGroup(GroupSeed seed, const Geometry& geometry);
  ~PeerGroup() override { finish(); }
  void connect() override;

  const char* path() const override { return "peers"; }

 protected:
  void launch(const CallRequest& request, cudaStream_t stream) override;
  void launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) override;
  std::optional<Error> reported() override;
  bool times_out_itself() const override { return true; }
  void release_waits() override;

 private:
  // A Program, with its steps in device memory.
  struct Loaded {
    ProgramImage image;
    DeviceMemory steps;
  };
  using ProgramKey = std::tuple<Collective, std::string, int>;
  using BatchKey = std::vector<std::pair<bool, int>>;

  Loaded load(ProgramImage image) const;
  const Loaded& program_for(const CallRequest& request, const std::string& algorithm);
  const Loaded& program_for(const std::vector<MessageRequest>& batch);
  PeerChoice choose(const CallRequest& request) const;
  void launch_fast(const CallRequest& request, const Call& call, const Vector& input,
                   const PeerChoice& choice, cudaStream_t stream) const;
  Vector scaled(const CallRequest& request, const Vector& input, cudaStream_t stream);
  Call call_of(uint32_t collective, uint32_t fingerprint,
               const std::optional<Nanoseconds>& timeout) const;

  const Driver driver_;
  PinnedMemory host_;
  GroupView view_;
  std::map<ProgramKey, Loaded> programs_;
  std::map<BatchKey, Loaded> batches_;
  // For premul_sum. Graphs may hold the smaller ones.
  std::vector<DeviceMemory> scaled_;
};

}  // namespace pycoll::cuda
