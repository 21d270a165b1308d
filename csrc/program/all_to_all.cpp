// all_to_all: output[i] on rank j is rank i's input[j].
#include "program/builders.h"

namespace pycoll {

// Pairwise exchange: at offset 1, 2, ... everybody sends so far ahead and receives from so far
// behind, so that no rank is everybody's target at once.
Program build_all_to_all_direct(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  const int32_t rank = request.rank;
  Program program;
  program.input_chunks = program.output_chunks = w;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  for (int32_t offset = 1; offset < w; ++offset) {
    const int32_t ahead = rank_at(request, offset);
    const int32_t behind = rank_at(request, -offset);
    steps.push_back({.kind = StepKind::send, .src = input(ahead), .to = ahead});
    steps.push_back({.kind = StepKind::recv, .dst = output(behind), .from = behind});
  }
  steps.push_back({.kind = StepKind::copy, .src = input(rank), .dst = output(rank)});
  return program;
}

}  // namespace pycoll
