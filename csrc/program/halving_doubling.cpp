// all_reduce by recursive halving and doubling (Rabenseifner; Thakur, Rabenseifner and Gropp,
// "Optimization of collective communication operations in MPICH", 2005): a reduce-scatter in which
// pairs at distance w/2, ..., 2, 1 split what they share, then an all-gather the way back. As
// little traffic as a ring in 2 log2(w) hops. One chunk an active rank; see recursive.h for other
// worlds than powers of two.
#include "program/builders.h"
#include "program/recursive.h"

namespace pycoll {

Program build_all_reduce_halving_doubling(const ProgramRequest& request) {
  const Fold fold(request.world_size);
  const int32_t rank = request.rank;
  Program program;
  program.input_chunks = program.output_chunks = program.acc_chunks = fold.actives;
  program.order = Order::lower_first;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  if (fold.is_passive(rank)) {
    for (int32_t chunk = 0; chunk < fold.actives; ++chunk) {
      steps.push_back({.kind = StepKind::send, .src = input(chunk), .to = rank - 1});
    }
    for (int32_t chunk = 0; chunk < fold.actives; ++chunk) {
      steps.push_back({.kind = StepKind::recv, .dst = output(chunk), .from = rank - 1});
    }
    return program;
  }
  const int32_t active = fold.active_of(rank);
  for (int32_t chunk = 0; fold.folds(active) && chunk < fold.actives; ++chunk) {
    steps.push_back({.kind = StepKind::recv_reduce,
                     .src = input(chunk),
                     .dst = acc(chunk),
                     .from = rank + 1,
                     .received_first = false});
  }
  const Exchange exchange{fold, active,
                          [](int32_t first, int32_t count) {
                            return ChunkSpan{first, first + count};
                          },
                          output};
  append_halving(steps, exchange);
  append_doubling(steps, exchange);
  for (int32_t chunk = 0; fold.folds(active) && chunk < fold.actives; ++chunk) {
    steps.push_back({.kind = StepKind::send, .src = output(chunk), .to = rank + 1});
  }
  return program;
}

}  // namespace pycoll
