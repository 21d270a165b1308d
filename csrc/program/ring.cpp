// all_reduce by a ring: w-1 hops of reduce-scatter, w-1 hops of all-gather (Patarasuk and Yuan,
// "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Chunk k starts
// behind rank k, is complete at rank k, its owner, and travels on from there.
#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {

Program build_all_reduce_ring(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t w = request.world_size;
  const int32_t previous = ring.at(-1);
  const int32_t next = ring.at(1);
  Program program;
  program.input_chunks = program.output_chunks = w;
  program.order = Order::ring_order;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  steps.push_back({.kind = StepKind::send, .src = input(previous), .to = next});
  for (int32_t hop = 1; hop < w; ++hop) {
    const int32_t chunk = ring.at(-1 - hop);
    const bool own = chunk == request.rank;
    steps.push_back({.kind = own ? StepKind::recv_reduce_copy_send : StepKind::recv_reduce_send,
                     .src = input(chunk),
                     .dst = own ? output(chunk) : Ref{},
                     .from = previous,
                     .to = next,
                     .wire = hop == 1 ? Wire::value : Wire::partial});
  }
  for (int32_t hop = 1; hop < w; ++hop) {
    const bool last = hop == w - 1;
    steps.push_back({.kind = last ? StepKind::recv : StepKind::recv_copy_send,
                     .dst = output(ring.at(-hop)),
                     .from = previous,
                     .to = last ? -1 : next});
  }
  return program;
}

}  // namespace pycoll
