#include "transport/cuda_ipc/identity.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/host.h"
#include "kernels/cuda/layout.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {
namespace {

DeviceIdentity identity_of(int device) {
  DeviceIdentity identity;
  const std::string host = host_identity();
  if (host.size() >= sizeof(identity.host)) {
    fail(ErrorKind::system, "the identity of this host has ", host.size(), " characters");
  }
  std::memcpy(identity.host, host.c_str(), host.size());
  require(cudaDeviceGetPCIBusId(identity.bus_id, sizeof(identity.bus_id), device),
          "cudaDeviceGetPCIBusId");
  cudaDeviceProp properties;
  require(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::memcpy(identity.uuid, properties.uuid.bytes, sizeof(identity.uuid));
  identity.process = ::getpid();
  identity.multiprocessors = properties.multiProcessorCount;
  return identity;
}

// Whether kernels of `device` may touch memory on a peer's of this host, as far as is known:
// of a device that this process does not see, only the attempt can tell.
bool reaches(int device, const DeviceIdentity& mine, const DeviceIdentity& peer) {
  if (mine.same_device(peer)) return true;
  int ordinal = 0, possible = 0;
  if (cudaDeviceGetByPCIBusId(&ordinal, peer.bus_id) != cudaSuccess) {
    cudaGetLastError();
    return true;
  }
  const bool known = cudaDeviceCanAccessPeer(&possible, device, ordinal) == cudaSuccess;
  cudaGetLastError();
  return known && possible != 0;
}

enum class Outcome : int32_t { good, impossible, failed };

// What one rank says of its part.
struct Verdict {
  Outcome outcome = Outcome::good;
  int32_t device = 0;
  char why[248] = {};
};

}  // namespace

bool DeviceIdentity::same_host(const DeviceIdentity& other) const {
  return std::strncmp(host, other.host, sizeof(host)) == 0;
}
bool DeviceIdentity::same_process(const DeviceIdentity& other) const {
  return same_host(other) && process == other.process;
}
bool DeviceIdentity::same_device(const DeviceIdentity& other) const {
  return same_host(other) && std::memcmp(uuid, other.uuid, sizeof(uuid)) == 0 &&
         std::strncmp(bus_id, other.bus_id, sizeof(bus_id)) == 0;
}

int Peers::least_multiprocessors() const {
  const auto fewer = [](const DeviceIdentity& a, const DeviceIdentity& b) {
    return a.multiprocessors < b.multiprocessors;
  };
  return std::min_element(identities.begin(), identities.end(), fewer)->multiprocessors;
}

void Meeting::together(const char* what, const std::function<void()>& part) const {
  Verdict mine;
  try {
    part();
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    const bool impossible = known != nullptr && known->kind() == ErrorKind::not_implemented;
    mine.outcome = impossible ? Outcome::impossible : Outcome::failed;
    mine.device = device;
    std::strncpy(mine.why, error.what(), sizeof(mine.why) - 1);
  }
  const std::vector<Verdict> all = exchange(mine);
  const auto worse = [](const Verdict& a, const Verdict& b) { return a.outcome < b.outcome; };
  const auto worst = std::max_element(all.begin(), all.end(), worse);
  if (worst->outcome == Outcome::good) return;
  fail(worst->outcome == Outcome::failed ? ErrorKind::system : ErrorKind::not_implemented, "rank ",
       rank, ": ", what, " failed on rank ", worst - all.begin(), ", which has GPU ", worst->device,
       ": ", worst->why);
}

Path choose_path(const std::vector<DeviceIdentity>& identities,
                 const std::vector<uint8_t>& reaches_all) {
  const auto yes = [](uint8_t reached) { return reached != 0; };
  if (!std::all_of(reaches_all.begin(), reaches_all.end(), yes)) return Path::staged;
  bool several_hosts = false;
  for (const DeviceIdentity& one : identities) {
    const auto here = [&](const DeviceIdentity& other) { return one.same_host(other); };
    if (std::count_if(identities.begin(), identities.end(), here) > kMaxRanks) return Path::staged;
    several_hosts |= !one.same_host(identities.front());
  }
  if (several_hosts) return Path::hosts;
  for (size_t a = 0; a < identities.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      // A kernel may wait for nobody on its own device: two processes take turns there.
      if (identities[a].same_device(identities[b])) return Path::shared_device;
    }
  }
  return identities.size() == 1 ? Path::shared_device : Path::peers;
}

Peers find_peers(const Meeting& meeting, int device) {
  Peers peers;
  peers.rank = meeting.rank;
  DeviceIdentity mine;
  meeting.together("asking for the GPU", [&] { mine = identity_of(device); });
  peers.identities = meeting.exchange(mine);
  const auto reached = [&](const DeviceIdentity& peer) {
    return !mine.same_host(peer) || reaches(device, mine, peer);
  };
  const bool all = std::all_of(peers.identities.begin(), peers.identities.end(), reached);
  peers.path = choose_path(peers.identities, meeting.exchange(static_cast<uint8_t>(all ? 1 : 0)));
  return peers;
}

}  // namespace pycoll::cuda
