// How far an atomic access reaches, as in PTX and CUDA C++. Two accesses synchronise only if each
// one's scope includes the other's thread.
#pragma once

#include <cstdint>

namespace pycoll::device {

enum class Scope : uint8_t {
  block,   // the threads of one block
  device,  // all kernels on one GPU
  system,  // all GPUs and the host
};

}  // namespace pycoll::device
