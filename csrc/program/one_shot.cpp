// all_reduce in one look: everybody shows its vector, everybody sums all of them in rank order. The
// least latency there is in shared memory; w times the reading, so for small vectors.
#include "program/builders.h"

namespace pycoll {

Program build_all_reduce_one_shot(const ProgramRequest& request) {
  Program program;
  program.input_chunks = program.output_chunks = program.window_chunks = 1;
  program.order = Order::rank_order;
  program.groups.push_back(everybody(request.world_size));
  program.lanes.push_back({{
      {.kind = StepKind::copy, .src = input(0), .dst = window(0)},
      {.kind = StepKind::barrier, .group = 0},
      {.kind = StepKind::reduce_from, .src = window(0), .dst = output(0), .group = 0},
  }});
  return program;
}

}  // namespace pycoll
