// all_reduce by recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of collective
// communication operations in MPICH", 2005): at distance 1, 2, 4, ... pairs exchange what they have
// and both sum it. Both put the block of lower ranks on the left, so both get the same bits.
// See recursive.h for other worlds than powers of two.
#include "program/builders.h"
#include "program/recursive.h"

namespace pycoll {

Program build_all_reduce_recursive_doubling(const ProgramRequest& request) {
  const Fold fold(request.world_size);
  const int32_t rank = request.rank;
  Program program;
  program.input_chunks = program.output_chunks = program.acc_chunks = 1;
  program.order = Order::lower_first;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  if (fold.is_passive(rank)) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = rank - 1});
    steps.push_back({.kind = StepKind::recv, .dst = output(0), .from = rank - 1});
    return program;
  }
  const int32_t active = fold.active_of(rank);
  const bool folds = fold.folds(active);
  Ref own = input(0);
  if (folds) {
    own = acc(0);
    steps.push_back({.kind = StepKind::recv_reduce,
                     .src = input(0),
                     .dst = own,
                     .from = rank + 1,
                     .received_first = false});
  }
  for (int32_t distance = 1; distance < fold.actives; distance *= 2) {
    const int32_t partner = active ^ distance;
    const int32_t peer = fold.rank_of(partner);
    const bool peer_has_input = distance == 1 && !fold.folds(partner);
    const bool last = distance * 2 == fold.actives;
    steps.push_back({.kind = StepKind::send, .src = own, .to = peer});
    steps.push_back({.kind = StepKind::recv_reduce,
                     .src = own,
                     .dst = last ? output(0) : acc(0),
                     .from = peer,
                     .wire = peer_has_input ? Wire::value : Wire::partial,
                     .received_first = partner < active});
    own = acc(0);
  }
  if (folds) steps.push_back({.kind = StepKind::send, .src = output(0), .to = rank + 1});
  return program;
}

}  // namespace pycoll
