// barrier: nobody leaves before everybody has come. Its vectors have no elements.
#include "program/builders.h"

namespace pycoll {

// Dissemination (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988):
// at distance 1, 2, 4, ... tell the rank ahead what the ranks behind have told.
Program build_barrier_recursive_doubling(const ProgramRequest& request) {
  Program program;
  program.input_chunks = program.output_chunks = 1;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;
  for (int32_t distance = 1; distance < request.world_size; distance *= 2) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = ring_rank(request, distance)});
    steps.push_back(
        {.kind = StepKind::recv, .dst = output(0), .from = ring_rank(request, -distance)});
  }
  return program;
}

Program build_barrier_one_shot(const ProgramRequest& request) {
  Program program;
  program.input_chunks = program.output_chunks = 1;
  program.groups.push_back(everybody(request.world_size));
  program.lanes.push_back({{{.kind = StepKind::barrier, .group = 0}}});
  return program;
}

}  // namespace pycoll
