#include "transport/cuda_ipc/liveness.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace pycoll::cuda {

// Made while all ranks are in the same collective call: the process with that number is the peer.
Liveness::Liveness(const Peers& peers) {
  for (int rank = 0; rank < peers.world_size(); ++rank) {
    if (peers.in_this_process(rank) || !peers.of(rank).same_host(peers.of(peers.rank))) continue;
    const auto pid = static_cast<pid_t>(peers.of(rank).process);
    UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    // Where the kernel has none, deaths are noticed by the CPU transport only.
    if (process) watched_.push_back({rank, std::move(process)});
  }
}

std::optional<int> Liveness::find_ended() const {
  for (const Watched& one : watched_) {
    pollfd entry{one.process.get(), POLLIN, 0};
    if (::poll(&entry, 1, 0) == 1) return one.rank;
  }
  return std::nullopt;
}

}  // namespace pycoll::cuda
