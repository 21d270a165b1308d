// What a rank's Program is run on.
#pragma once

#include <vector>

#include "kernels/reduce.h"
#include "program/program.h"
#include "transport/call.h"

namespace pycoll {

struct Block {
  std::byte* data = nullptr;
  uint64_t count = 0;  // elements
};

// A caller's vector: blocks, which need not lie together. Chunks are parts of blocks. Blocks of
// all_gather, reduce_scatter and all_to_all may differ in length: chunk k is then block k.
struct VectorView {
  std::vector<Block> blocks;

  uint64_t count() const {
    uint64_t sum = 0;
    for (const Block& block : blocks) sum += block.count;
    return sum;
  }
};

struct ExecutorInput {
  const Program* program = nullptr;
  const ReduceKernels* kernels = nullptr;  // nullptr when nothing is reduced
  CallHeader call;
  VectorView input;
  VectorView output;
  const Program* fallback = nullptr;  // runs instead when `program` needs a lease and gets none
  uint64_t slice = 0;                 // slice_elements() of `program`, where it is known already
};

}  // namespace pycoll
