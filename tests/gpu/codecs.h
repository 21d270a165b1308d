// Codecs on a GPU: timed like other operations, and checked against the host byte for byte.
#pragma once

#include "kernels/codec.h"
#include "world.h"

namespace pycoll::gpu_tests {

struct Coded {
  CodecKind kind;
  bool stochastic = false;
  int32_t codes = 1;  // that are summed
};

// Of rank 0's vector into its code; and of that code, taken `codes` times, into its output.
void launch_encode(World& world, const Coded& coded);
void launch_decode(World& world, const Coded& coded);

// Every codec and type, with a residual and without, at a few lengths, of which `longest` is one.
// Returns how many calls were compared.
int check_codecs(uint64_t longest);

}  // namespace pycoll::gpu_tests
