// Kernels over lists of tensors (kernels/cuda/fused.h) on a GPU, against the CPU's, byte for byte.
#pragma once

#include <cstdint>

namespace pycoll::gpu_tests {

// Throws where something differs.
void check_lists(int cases, uint64_t seed);

}  // namespace pycoll::gpu_tests
