// reduce_scatter: output[0] on rank k is the sum of everybody's input[k].
#include "program/builders.h"
#include "program/recursive.h"
#include "program/topology.h"

namespace pycoll {

// Chunk k starts behind rank k and is complete at rank k, as in the first half of the ring
// all_reduce.
Program build_reduce_scatter_ring(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t w = request.world_size;
  Program program;
  program.input_chunks = w;
  program.output_chunks = 1;
  program.order = Order::ring_order;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  steps.push_back({.kind = StepKind::send, .src = input(ring.at(-1)), .to = ring.at(1)});
  for (int32_t hop = 1; hop < w; ++hop) {
    const bool last = hop == w - 1;
    steps.push_back({.kind = last ? StepKind::recv_reduce : StepKind::recv_reduce_send,
                     .src = input(ring.at(-1 - hop)),
                     .dst = last ? output(0) : Ref{},
                     .from = ring.at(-1),
                     .to = last ? -1 : ring.at(1),
                     .wire = hop == 1 ? Wire::value : Wire::partial});
  }
  return program;
}

// The active of a folded pair sums both blocks. The passive one's goes to it as a partial sum, to
// be finished there: the active has an output for its own block only.
Program build_reduce_scatter_recursive_halving(const ProgramRequest& request) {
  const Fold fold(request.world_size);
  const int32_t w = request.world_size;
  const int32_t rank = request.rank;
  Program program;
  program.input_chunks = program.acc_chunks = w;
  program.output_chunks = 1;
  program.order = Order::lower_first;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  if (fold.is_passive(rank)) {
    for (int32_t chunk = 0; chunk < w; ++chunk) {
      steps.push_back({.kind = StepKind::send, .src = input(chunk), .to = rank - 1});
    }
    steps.push_back(
        {.kind = StepKind::recv, .dst = acc(rank), .from = rank - 1, .wire = Wire::partial});
    steps.push_back({.kind = StepKind::copy, .src = acc(rank), .dst = output(0)});
    return program;
  }
  const int32_t active = fold.active_of(rank);
  const bool folds = fold.folds(active);
  for (int32_t chunk = 0; folds && chunk < w; ++chunk) {
    steps.push_back({.kind = StepKind::recv_reduce,
                     .src = input(chunk),
                     .dst = acc(chunk),
                     .from = rank + 1,
                     .received_first = false});
  }
  const auto chunks = [&fold](int32_t first, int32_t count) {
    return ChunkSpan{fold.rank_of(first), fold.rank_of(first + count)};
  };
  const auto result = [rank](int32_t chunk) { return chunk == rank ? output(0) : acc(chunk); };
  append_halving(steps, {fold, active, chunks, result});
  if (folds) steps.push_back({.kind = StepKind::send, .src = acc(rank + 1), .to = rank + 1});
  return program;
}

// Everybody sends every owner its block. The owner begins with its own and adds the others' as they
// stand on the ring behind it.
Program build_reduce_scatter_direct(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t w = request.world_size;
  const int32_t rank = request.rank;
  Program program;
  program.input_chunks = program.acc_chunks = w;
  program.output_chunks = 1;
  program.order = Order::ring_order;
  std::vector<Step>& steps = program.lanes.emplace_back().steps;

  for (int32_t offset = 1; offset < w; ++offset) {
    const int32_t owner = ring.at(-offset);
    steps.push_back({.kind = StepKind::send, .src = input(owner), .to = owner});
  }
  for (int32_t offset = 1; offset < w; ++offset) {
    steps.push_back({.kind = StepKind::recv_reduce,
                     .src = offset == 1 ? input(rank) : acc(rank),
                     .dst = offset == w - 1 ? output(0) : acc(rank),
                     .from = ring.at(offset),
                     .received_first = false});
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
    const int32_t chunk = rank_at(request, offset);
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
