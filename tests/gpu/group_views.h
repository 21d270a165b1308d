// Groups that no host side has made: what each rank of a test sees of the others' memory, on a GPU
// (world.h) or on the executor alone (../sim/device_group.h).
#pragma once

#include <vector>

#include "kernels/cuda/layout.h"

namespace pycoll::tests {

// Vectors of some hundred elements go round every FIFO and window several times, with few threads.
cuda::Geometry small_geometry(int ranks);

// Of one region a rank, zeroed, and of one HostWords a rank. Throws std::invalid_argument where
// `geometry` cannot be used.
std::vector<cuda::GroupView> views_of(const cuda::Geometry& geometry,
                                      const std::vector<std::byte*>& regions,
                                      cuda::HostWords* hosts);

}  // namespace pycoll::tests
