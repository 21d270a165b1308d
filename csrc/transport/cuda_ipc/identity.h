// Which device a rank has, and which way to its peers that leaves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace pycoll::cuda {

// How the ranks of a group tell each other something while it is made.
struct Meeting {
  int rank = 0;
  int world_size = 1;
  int device = 0;  // an ordinal of this process, for errors
  // Everybody's bytes by rank, of one length. Blocks; throws what the group throws.
  std::function<std::vector<std::byte>(const std::vector<std::byte>&)> all_gather;

  // Plain data.
  template <class T>
  std::vector<T> exchange(const T& mine) const;
  // Where a rank's part of something collective may fail: throws everywhere what it threw
  // somewhere. As Error(not_implemented) where all that failed threw that, else Error(system).
  void together(const char* what, const std::function<void()>& part) const;
};

// Plain data, as exchanged. Ordinals are of no use to others: CUDA_VISIBLE_DEVICES renumbers.
struct DeviceIdentity {
  char host[320] = {};   // host_identity()
  char bus_id[32] = {};  // PCI
  char uuid[16] = {};    // parts of one GPU (MIG) differ
  int64_t process = 0;
  int32_t multiprocessors = 0;

  bool same_host(const DeviceIdentity& other) const;
  bool same_process(const DeviceIdentity& other) const;
  bool same_device(const DeviceIdentity& other) const;
};

enum class Path : uint8_t {
  shared_device,  // kernels that never wait, ordered by words that streams wait for
  peers,          // one device a rank: kernels that wait for their peers' kernels
  hosts,          // one of these inside of each host, the CPU transport between them
  staged,         // pinned host memory and the CPU transport
};

// What all ranks know of all ranks.
struct Peers {
  int rank = 0;
  std::vector<DeviceIdentity> identities;
  Path path = Path::staged;

  int world_size() const { return static_cast<int>(identities.size()); }
  const DeviceIdentity& of(int peer) const { return identities[static_cast<size_t>(peer)]; }
  bool in_this_process(int peer) const { return of(peer).same_process(of(rank)); }
  int least_multiprocessors() const;
};

// Collective; the same on every rank. `device` is an ordinal of this process.
Peers find_peers(const Meeting& meeting, int device);

// The choice, from what all ranks know: whether rank r reaches the memory of all ranks of its host.
Path choose_path(const std::vector<DeviceIdentity>& identities,
                 const std::vector<uint8_t>& reaches_all);

template <class T>
std::vector<T> Meeting::exchange(const T& mine) const {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto* bytes = reinterpret_cast<const std::byte*>(&mine);
  const std::vector<std::byte> all = all_gather({bytes, bytes + sizeof(T)});
  std::vector<T> values(static_cast<size_t>(world_size));
  for (size_t r = 0; r < values.size(); ++r) {
    std::copy_n(all.data() + r * sizeof(T), sizeof(T), reinterpret_cast<std::byte*>(&values[r]));
  }
  return values;
}

}  // namespace pycoll::cuda
