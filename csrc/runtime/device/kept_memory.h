// Memory that a group's calls take turns with. It grows, and keeps what it gave before: calls under
// way, and graphs, may use that.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {

// Of DeviceMemory or PinnedMemory.
template <class Memory>
class KeptMemory {
 public:
  // At least so many bytes. They are the next call's, too: whoever asks orders the calls. `least`:
  // of what is allocated, so that small calls do not each find the memory too small.
  std::byte* room(size_t bytes, size_t least = 1) {
    if (pieces_.empty() || pieces_.back().size() < bytes) {
      const RelaxedCapture relaxed;
      pieces_.emplace_back(std::bit_ceil(std::max(bytes, least)));
    }
    return pieces_.back().data();
  }

 private:
  std::vector<Memory> pieces_;
};

}  // namespace pycoll::cuda
