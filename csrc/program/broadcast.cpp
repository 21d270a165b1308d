// broadcast: every rank's output is the root's input. One chunk; its slices pipeline over rounds.
#include "program/builders.h"

namespace pycoll {

// Binomial tree on ranks counted from the root: the parent of v is v without its lowest set bit.
Program build_broadcast_tree(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  const int32_t place = ring_rank(request, -request.root);
  const auto rank_at = [&](int32_t v) { return (v + request.root) % w; };
  Program program;
  program.input_chunks = program.output_chunks = 1;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  int32_t reach = place & -place;
  if (place == 0) {
    for (reach = 1; reach < w;) reach *= 2;
  } else {
    steps.push_back({.kind = StepKind::recv, .dst = output(0), .from = rank_at(place - reach)});
  }
  // The child with the largest subtree first.
  for (int32_t distance = reach / 2; distance >= 1; distance /= 2) {
    if (place + distance >= w) continue;
    const int32_t child = rank_at(place + distance);
    if (steps.size() == 1 && steps[0].kind == StepKind::recv) {
      steps[0].kind = StepKind::recv_copy_send;
      steps[0].to = child;
    } else {
      steps.push_back(
          {.kind = StepKind::send, .src = place == 0 ? input(0) : output(0), .to = child});
    }
  }
  if (place == 0) steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(0)});
  return program;
}

Program build_broadcast_one_shot(const ProgramRequest& request) {
  const bool root = request.rank == request.root;
  Program program;
  program.input_chunks = program.output_chunks = program.window_chunks = 1;
  program.groups.push_back(everybody(request.world_size));
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  if (root) steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = window(0)});
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  if (root) {
    steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(0)});
  } else {
    steps.push_back({.kind = StepKind::copy_from, .dst = output(0), .from = request.root});
  }
  return program;
}

}  // namespace pycoll
