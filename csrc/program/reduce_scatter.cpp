// reduce_scatter: output[0] on rank k is the sum of everybody's input[k].
#include "program/builders.h"

namespace pycoll {

// Chunk k starts at rank k+1 and is complete at rank k, as in the first half of the ring
// all_reduce.
Program build_reduce_scatter_ring(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  const int32_t previous = ring_rank(request, -1);
  const int32_t next = ring_rank(request, 1);
  Program program;
  program.input_chunks = w;
  program.output_chunks = 1;
  program.order = Order::ring_order;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  steps.push_back({.kind = StepKind::send, .src = input(previous), .to = next});
  for (int32_t hop = 1; hop < w; ++hop) {
    const bool last = hop == w - 1;
    steps.push_back({.kind = last ? StepKind::recv_reduce : StepKind::recv_reduce_send,
                     .src = input(ring_rank(request, -1 - hop)),
                     .dst = last ? output(0) : Ref{},
                     .from = previous,
                     .to = last ? -1 : next,
                     .wire = hop == 1 ? Wire::value : Wire::partial});
  }
  return program;
}

Program build_reduce_scatter_one_shot(const ProgramRequest& request) {
  const int32_t w = request.world_size;
  Program program;
  program.input_chunks = program.window_chunks = w;
  program.output_chunks = 1;
  program.order = Order::rank_order;
  program.groups.push_back(everybody(w));
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  for (int32_t offset = 1; offset < w; ++offset) {
    const int32_t chunk = ring_rank(request, offset);
    steps.push_back({.kind = StepKind::copy, .src = input(chunk), .dst = window(chunk)});
  }
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  steps.push_back({.kind = StepKind::reduce_from,
                   .src = input(request.rank),
                   .dst = output(0),
                   .group = 0,
                   .remote_chunk = request.rank});
  return program;
}

}  // namespace pycoll
