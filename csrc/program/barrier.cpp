// barrier: nobody leaves before everybody has come. Its vectors have no elements.
#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {
namespace {

Program empty_vectors() {
  Program program;
  program.input_chunks = program.output_chunks = 1;
  program.lanes.emplace_back();
  return program;
}

Step tell(int32_t peer) {
  return {.kind = StepKind::send, .src = input(0), .to = peer};
}

Step hear(int32_t peer) {
  return {.kind = StepKind::recv, .dst = output(0), .from = peer};
}

}  // namespace

// Dissemination (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988):
// at distance 1, 2, 4, ... tell the rank ahead what the ranks behind have told.
Program build_barrier_recursive_doubling(const ProgramRequest& request) {
  Program program = empty_vectors();
  std::vector<Step>& steps = program.lanes[0].steps;
  for (int32_t distance = 1; distance < request.world_size; distance *= 2) {
    steps.push_back(tell(rank_at(request, distance)));
    steps.push_back(hear(rank_at(request, -distance)));
  }
  return program;
}

// A message goes round the ring twice: the first time it collects, the second it releases.
Program build_barrier_ring(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t previous = ring.at(-1);
  const int32_t next = ring.at(1);
  const int32_t first = ring.order().front();
  const int32_t last = ring.order().back();
  Program program = empty_vectors();
  std::vector<Step>& steps = program.lanes[0].steps;
  if (request.rank == first) {
    steps = {tell(next), hear(previous), tell(next)};
    return program;
  }
  const Step pass_on{.kind = StepKind::recv_send, .from = previous, .to = next};
  steps = {pass_on, request.rank == last ? hear(previous) : pass_on};
  return program;
}

Program build_barrier_direct(const ProgramRequest& request) {
  Program program = empty_vectors();
  std::vector<Step>& steps = program.lanes[0].steps;
  for (int32_t offset = 1; offset < request.world_size; ++offset) {
    steps.push_back(tell(rank_at(request, offset)));
  }
  for (int32_t offset = 1; offset < request.world_size; ++offset) {
    steps.push_back(hear(rank_at(request, -offset)));
  }
  return program;
}

Program build_barrier_one_shot(const ProgramRequest& request) {
  Program program = empty_vectors();
  program.groups.push_back(everybody(request.world_size));
  program.lanes[0].steps = {{.kind = StepKind::barrier, .group = 0}};
  return program;
}

}  // namespace pycoll
