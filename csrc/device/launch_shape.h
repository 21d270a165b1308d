// How many threads run a kernel, and the dynamic shared memory of each block.
#pragma once

#include <vector_types.h>

#include <cstddef>

namespace pycoll::device {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
};

}  // namespace pycoll::device
