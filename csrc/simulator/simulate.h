// How long a collective takes on a machine that is described, not at hand: the Programs that the
// executor runs, cut into slices as the executor cuts them (runtime/slices.h), on the event engine.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "program/program.h"
#include "simulator/machine.h"
#include "transport/transport.h"

namespace pycoll::simulator {

struct SimulationRequest {
  Collective collective = Collective::all_reduce;
  std::string algorithm;
  int32_t ranks = 2;
  int32_t root = 0;
  // Of the longest of a rank's vectors: all ranks' blocks together for all_gather, reduce_scatter,
  // gather, scatter and all_to_all (blocks are rounded up to whole elements, all alike).
  uint64_t bytes = 0;
  DType dtype = DType::float32;
  bool in_place = true;        // input and output are one memory
  TransportGeometry geometry;  // slots, FIFO depth and windows, as the executor gets them
  Machine machine;
  bool use_symmetry = true;            // where it is exact and saves work:
  uint64_t symmetry_from = 1'000'000;  // executed steps from which on it is looked for
  uint64_t most_steps = 100'000'000;   // that are held in memory
};

struct SimulationResult {
  double seconds = 0;            // until the last rank has finished
  std::vector<double> finished;  // of each simulated rank
  uint64_t rounds = 0;
  uint64_t steps = 0;  // executed
  uint64_t events = 0;
  int32_t simulated_ranks = 0;  // fewer than all: the others see the same (symmetry.h)
  int32_t compared_hosts = 0;   // whose Programs were compared with host 0's, where that is so
  double network_bytes = 0;     // between all hosts
  uint64_t network_messages = 0;
};

// Throws Error(invalid_argument) for wrong requests, for an algorithm that cannot run there
// (windows over several hosts), for more steps than allowed, and for a deadlock; the message says
// which. `tick` is called now and then and may throw.
SimulationResult simulate(const SimulationRequest& request, const std::function<void()>& tick);

}  // namespace pycoll::simulator
