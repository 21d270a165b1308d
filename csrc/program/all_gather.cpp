// all_gather: output[k] is rank k's input, whole, on every rank.
#include "program/builders.h"

namespace pycoll {

Program build_all_gather_ring(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  const int32_t previous = ring_rank(request, -1);
  const int32_t next = ring_rank(request, 1);
  Program program;
  program.input_chunks = 1;
  program.output_chunks = w;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  steps.push_back({.kind = StepKind::send, .src = input(0), .to = next});
  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(request.rank)});
  for (int32_t hop = 1; hop < w; ++hop) {
    const bool last = hop == w - 1;
    steps.push_back({.kind = last ? StepKind::recv : StepKind::recv_copy_send,
                     .dst = output(ring_rank(request, -hop)),
                     .from = previous,
                     .to = last ? -1 : next});
  }
  return program;
}

Program build_all_gather_one_shot(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  Program program;
  program.input_chunks = program.window_chunks = 1;
  program.output_chunks = w;
  program.groups.push_back(everybody(w));
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = window(0)});
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(request.rank)});
  for (int32_t offset = 1; offset < w; ++offset) {
    const int32_t peer = ring_rank(request, offset);
    steps.push_back({.kind = StepKind::copy_from, .dst = output(peer), .from = peer});
  }
  return program;
}

}  // namespace pycoll
