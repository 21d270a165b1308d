// scatter: rank k's output is the root's input[k], whole; nobody else has an input.
#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {
namespace {

Program blocks_from_root(const ProgramRequest& request) {
  Program program;
  program.input_chunks = request.world_size;
  program.output_chunks = 1;
  program.lanes.emplace_back();
  return program;
}

Step keep_own(const ProgramRequest& request) {
  return {.kind = StepKind::copy, .src = input(request.rank), .dst = output(0)};
}

}  // namespace

Program build_scatter_direct(const ProgramRequest& request) {
  Program program = blocks_from_root(request);
  std::vector<Step>& steps = program.lanes[0].steps;
  if (request.rank != request.root) {
    steps.push_back({.kind = StepKind::recv, .dst = output(0), .from = request.root});
    return program;
  }
  for (int32_t offset = 1; offset < request.world_size; ++offset) {
    const int32_t peer = rank_at(request, offset);
    steps.push_back({.kind = StepKind::send, .src = input(peer), .to = peer});
  }
  steps.push_back(keep_own(request));
  return program;
}

// A chain from the root round the ring: the block that goes farthest comes first, and each rank
// passes on all but the last, which is its own.
Program build_scatter_ring(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t w = request.world_size;
  Program program = blocks_from_root(request);
  std::vector<Step>& steps = program.lanes[0].steps;
  if (request.rank == request.root) {
    for (int32_t hops = w - 1; hops >= 1; --hops) {
      steps.push_back({.kind = StepKind::send, .src = input(ring.at(hops)), .to = ring.at(1)});
    }
    steps.push_back(keep_own(request));
    return program;
  }
  for (int32_t beyond = w - 1 - ring.distance_from(request.root); beyond > 0; --beyond) {
    steps.push_back({.kind = StepKind::recv_send, .from = ring.at(-1), .to = ring.at(1)});
  }
  steps.push_back({.kind = StepKind::recv, .dst = output(0), .from = ring.at(-1)});
  return program;
}

Program build_scatter_one_shot(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  Program program = blocks_from_root(request);
  program.window_chunks = w;
  program.groups.push_back(everybody(w));
  std::vector<Step>& steps = program.lanes[0].steps;
  const bool root = request.rank == request.root;

  for (int32_t offset = 1; root && offset < w; ++offset) {
    const int32_t peer = rank_at(request, offset);
    steps.push_back({.kind = StepKind::copy, .src = input(peer), .dst = window(peer)});
  }
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  if (root) {
    steps.push_back(keep_own(request));
  } else {
    steps.push_back({.kind = StepKind::copy_from,
                     .dst = output(0),
                     .from = request.root,
                     .remote_chunk = request.rank});
  }
  return program;
}

}  // namespace pycoll
