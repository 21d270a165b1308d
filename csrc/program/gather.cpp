// gather: the root's output[k] is rank k's input, whole; nobody else has an output.
#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {
namespace {

Program blocks_to_root(const ProgramRequest& request) {
  Program program;
  program.input_chunks = 1;
  program.output_chunks = request.world_size;
  program.lanes.emplace_back();
  return program;
}

Step keep_own(const ProgramRequest& request) {
  return {.kind = StepKind::copy, .src = input(0), .dst = output(request.rank)};
}

}  // namespace

Program build_gather_direct(const ProgramRequest& request) {
  Program program = blocks_to_root(request);
  std::vector<Step>& steps = program.lanes[0].steps;
  if (request.rank != request.root) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = request.root});
    return program;
  }
  steps.push_back(keep_own(request));
  for (int32_t offset = 1; offset < request.world_size; ++offset) {
    const int32_t peer = rank_at(request, offset);
    steps.push_back({.kind = StepKind::recv, .dst = output(peer), .from = peer});
  }
  return program;
}

// A chain round the ring that begins behind the root and ends at it: each rank sends its own block,
// then passes on what comes from behind, the nearest first.
Program build_gather_ring(const ProgramRequest& request) {
  const Ring ring(request);
  Program program = blocks_to_root(request);
  std::vector<Step>& steps = program.lanes[0].steps;
  if (request.rank == request.root) {
    steps.push_back(keep_own(request));
    for (int32_t hop = 1; hop < request.world_size; ++hop) {
      steps.push_back({.kind = StepKind::recv, .dst = output(ring.at(-hop)), .from = ring.at(-1)});
    }
    return program;
  }
  steps.push_back({.kind = StepKind::send, .src = input(0), .to = ring.at(1)});
  for (int32_t behind = ring.distance_from(request.root) - 1; behind > 0; --behind) {
    steps.push_back({.kind = StepKind::recv_send, .from = ring.at(-1), .to = ring.at(1)});
  }
  return program;
}

Program build_gather_one_shot(const ProgramRequest& request) {
  Program program = blocks_to_root(request);
  program.window_chunks = 1;
  program.groups.push_back(everybody(request.world_size));
  std::vector<Step>& steps = program.lanes[0].steps;
  const bool root = request.rank == request.root;

  if (!root) steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = window(0)});
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  if (!root) return program;
  steps.push_back(keep_own(request));
  for (int32_t offset = 1; offset < request.world_size; ++offset) {
    const int32_t peer = rank_at(request, offset);
    steps.push_back({.kind = StepKind::copy_from, .dst = output(peer), .from = peer});
  }
  return program;
}

}  // namespace pycoll
