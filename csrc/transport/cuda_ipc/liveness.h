// Whether the processes of a group on this host are alive.
#pragma once

#include <optional>
#include <vector>

#include "core/fd.h"
#include "transport/cuda_ipc/identity.h"

namespace pycoll::cuda {

class Liveness {
 public:
  explicit Liveness(const Peers& peers);

  // A rank on this host whose process has ended, in whatever way.
  std::optional<int> find_ended() const;

 private:
  struct Watched {
    int rank;
    UniqueFd process;
  };
  std::vector<Watched> watched_;
};

}  // namespace pycoll::cuda
