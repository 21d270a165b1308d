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

// How a Program runs on vectors of given lengths (Executor::shape_of).
struct Shape {
  uint64_t slice = 0;  // elements; 0: not known
  uint64_t rounds = 0;
  bool in_cell = false;
  size_t window_stride = 0;  // bytes from one window chunk to the next
  // Rounds that are under way at a time. Flight f runs rounds f, f + flights, ..., all lanes of
  // each, over FIFOs of its own: so the order of messages in a FIFO does not depend on which flight
  // is ahead. Rounds work on slices of their own, so flights share no memory.
  int flights = 1;
};

struct ExecutorInput {
  const Program* program = nullptr;
  const ReduceKernels* kernels = nullptr;  // nullptr when nothing is reduced
  CallHeader call;
  VectorView input;
  VectorView output;
  const Program* fallback = nullptr;  // runs instead when `program` needs a lease and gets none
  Shape shape{};                      // of `program` on these vectors, where it is known already
};

}  // namespace pycoll
