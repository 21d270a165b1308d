// all_reduce in two looks through shared memory: rank k sums chunk k of everybody in rank order,
// then everybody reads the sums. Only what a peer reads is staged: a rank's own chunk goes from the
// caller's input straight into the sum.
#include "program/builders.h"

namespace pycoll {

Program build_all_reduce_two_shot(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  const int32_t own = request.rank;
  Program program;
  program.input_chunks = program.output_chunks = program.window_chunks = w;
  program.order = Order::rank_order;
  program.groups.push_back(everybody(w));
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  // Everybody starts at its own neighbour, so that no window is read by all at once.
  for (int32_t offset = 1; offset < w; ++offset) {
    const int32_t chunk = rank_at(request, offset);
    steps.push_back({.kind = StepKind::copy, .src = input(chunk), .dst = window(chunk)});
  }
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  steps.push_back({.kind = StepKind::reduce_from,
                   .src = input(own),
                   .dst = output(own),
                   .group = 0,
                   .remote_chunk = own});
  steps.push_back({.kind = StepKind::copy, .src = output(own), .dst = window(own)});
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  for (int32_t offset = 1; offset < w; ++offset) {
    const int32_t owner = rank_at(request, offset);
    steps.push_back(
        {.kind = StepKind::copy_from, .dst = output(owner), .from = owner, .remote_chunk = owner});
  }
  return program;
}

}  // namespace pycoll
