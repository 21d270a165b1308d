// Which kernel runs a collective of ranks on different devices: the one that a model expects to be
// done first. A pure function of what all ranks know.
#pragma once

#include <cstdint>

#include "core/config.h"
#include "kernels/cuda/kernels.h"

namespace pycoll::cuda {

using FastAllReduce = cudaError_t (*)(const GroupView&, const AllReduceCall&, cudaStream_t);

struct PeerChoice {
  const char* algorithm;  // its name; of a Program, where there is no `fast`
  FastAllReduce fast;     // nullptr: the Program
};

// What a choice goes by.
struct PeerCall {
  Collective collective = Collective::barrier;
  uint64_t bytes = 0;  // of the whole vector: the longer one of input and output
  bool fast = false;   // has_fast_all_reduce()
  Determinism determinism = Determinism::run;
};

// Throws Error(not_implemented) for a collective that has no row.
PeerChoice choose_for_peers(const PeerCall& call, const Geometry& geometry);

}  // namespace pycoll::cuda
