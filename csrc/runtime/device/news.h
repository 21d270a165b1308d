// How ranks hear that a peer has given the group up: a word a peer, in memory on the device.
#pragma once

#include <optional>

#include "core/clock.h"
#include "transport/cuda_ipc/regions.h"

namespace pycoll::cuda {

class PeerNews {
 public:
  // Words [rank] at `offset` of each region, zero at first; word r is written by rank r.
  PeerNews(const Regions& regions, uint64_t offset, int rank);
  // What it has told has arrived.
  ~PeerNews() { cudaStreamSynchronize(stream_.get()); }

  // Tells all peers. Does not wait.
  void tell();
  // A peer that has given up, as far as it is known. Does not wait: it reads what the look before
  // has asked for, and at most every kPeriod asks again.
  std::optional<int> look();

 private:
  static constexpr Nanoseconds kPeriod = std::chrono::milliseconds(10);

  const Regions& regions_;
  const uint64_t offset_;
  const int rank_;
  PinnedMemory words_;  // [world_size] as read, then what is told
  Stream stream_ = Stream::ahead_of_others();
  Event read_;
  bool asked_ = false;
  Clock::time_point asked_at_{};
};

}  // namespace pycoll::cuda
