// all_gather: output[k] is rank k's input, whole, on every rank.
#include "program/builders.h"
#include "program/recursive.h"
#include "program/topology.h"

namespace pycoll {

Program build_all_gather_ring(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t w = request.world_size;
  Program program;
  program.input_chunks = 1;
  program.output_chunks = w;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  steps.push_back({.kind = StepKind::send, .src = input(0), .to = ring.at(1)});
  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(request.rank)});
  for (int32_t hop = 1; hop < w; ++hop) {
    const bool last = hop == w - 1;
    steps.push_back({.kind = last ? StepKind::recv : StepKind::recv_copy_send,
                     .dst = output(ring.at(-hop)),
                     .from = ring.at(-1),
                     .to = last ? -1 : ring.at(1)});
  }
  return program;
}

// The active of a folded pair stands for both blocks; the passive one gets all the others' last.
Program build_all_gather_recursive_doubling(const ProgramRequest& request) {
  const Fold fold(request.world_size);
  const int32_t w = request.world_size;
  const int32_t rank = request.rank;
  Program program;
  program.input_chunks = 1;
  program.output_chunks = w;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(rank)});
  if (fold.is_passive(rank)) {
    steps.push_back({.kind = StepKind::send, .src = output(rank), .to = rank - 1});
    for (int32_t chunk = 0; chunk < w; ++chunk) {
      if (chunk == rank) continue;
      steps.push_back({.kind = StepKind::recv, .dst = output(chunk), .from = rank - 1});
    }
    return program;
  }
  const int32_t active = fold.active_of(rank);
  const bool folds = fold.folds(active);
  if (folds) {
    steps.push_back({.kind = StepKind::recv, .dst = output(rank + 1), .from = rank + 1});
  }
  const auto chunks = [&fold](int32_t first, int32_t count) {
    return ChunkSpan{fold.rank_of(first), fold.rank_of(first + count)};
  };
  append_doubling(steps, {fold, active, chunks, output});
  for (int32_t chunk = 0; folds && chunk < w; ++chunk) {
    if (chunk == rank + 1) continue;
    steps.push_back({.kind = StepKind::send, .src = output(chunk), .to = rank + 1});
  }
  return program;
}

Program build_all_gather_direct(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  Program program;
  program.input_chunks = 1;
  program.output_chunks = w;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  for (int32_t offset = 1; offset < w; ++offset) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = rank_at(request, offset)});
  }
  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(request.rank)});
  for (int32_t offset = 1; offset < w; ++offset) {
    const int32_t peer = rank_at(request, -offset);
    steps.push_back({.kind = StepKind::recv, .dst = output(peer), .from = peer});
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
    const int32_t peer = rank_at(request, offset);
    steps.push_back({.kind = StepKind::copy_from, .dst = output(peer), .from = peer});
  }
  return program;
}

}  // namespace pycoll
