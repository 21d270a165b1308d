// reduce: the root's output is the sum of everybody's input; nobody else has an output. One chunk;
// its slices pipeline over rounds.
#include <algorithm>

#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {
namespace {

Program one_chunk(Order order) {
  Program program;
  program.input_chunks = program.output_chunks = program.acc_chunks = 1;
  program.order = order;
  program.lanes.emplace_back();
  return program;
}

}  // namespace

// A binomial tree: at every sum the side with the lowest rank stands on the left, wherever the
// root.
Program build_reduce_tree(const ProgramRequest& request) {
  const BinomialTree tree(request.rank, request.root, request.world_size);
  Program program = one_chunk(Order::lower_first);
  std::vector<Step>& steps = program.lanes[0].steps;
  if (tree.children().empty()) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = tree.parent()});
    return program;
  }
  Ref own = input(0);
  int32_t lowest = request.rank;
  for (const int32_t child : tree.children()) {
    const bool last = child == tree.children().back();
    const bool root = tree.parent() < 0;
    const BinomialTree below(child, request.root, request.world_size);
    const int32_t received = BinomialTree::lowest_below(child, request.root, request.world_size);
    Step step{.kind = StepKind::recv_reduce,
              .src = own,
              .dst = acc(0),
              .from = child,
              .wire = below.children().empty() ? Wire::value : Wire::partial,
              .received_first = received < lowest};
    if (last && root) step.dst = output(0);
    if (last && !root) {
      step.kind = StepKind::recv_reduce_send;
      step.dst = {};
      step.to = tree.parent();
    }
    steps.push_back(step);
    own = acc(0);
    lowest = std::min(lowest, received);
  }
  return program;
}

// A chain round the ring that begins behind the root and ends at it.
Program build_reduce_ring(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t hops = ring.distance_from(request.root);  // 0: the root
  Program program = one_chunk(Order::ring_order);
  std::vector<Step>& steps = program.lanes[0].steps;
  if (hops == 1) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = ring.at(1)});
    return program;
  }
  const bool root = hops == 0;
  const bool first_is_before = ring.at(-2) == request.root;
  steps.push_back({.kind = root ? StepKind::recv_reduce : StepKind::recv_reduce_send,
                   .src = input(0),
                   .dst = root ? output(0) : Ref{},
                   .from = ring.at(-1),
                   .to = root ? -1 : ring.at(1),
                   .wire = first_is_before ? Wire::value : Wire::partial});
  return program;
}

// The root begins with its own vector and adds the others' as they stand on the ring behind it.
Program build_reduce_direct(const ProgramRequest& request) {
  const Ring ring(request);
  const int32_t w = request.world_size;
  Program program = one_chunk(Order::ring_order);
  std::vector<Step>& steps = program.lanes[0].steps;
  if (request.rank != request.root) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = request.root});
    return program;
  }
  for (int32_t offset = 1; offset < w; ++offset) {
    steps.push_back({.kind = StepKind::recv_reduce,
                     .src = offset == 1 ? input(0) : acc(0),
                     .dst = offset == w - 1 ? output(0) : acc(0),
                     .from = ring.at(offset),
                     .received_first = false});
  }
  return program;
}

Program build_reduce_one_shot(const ProgramRequest& request) {
  const bool root = request.rank == request.root;
  Program program = one_chunk(Order::rank_order);
  program.acc_chunks = 0;
  program.window_chunks = 1;
  program.groups.push_back(everybody(request.world_size));
  std::vector<Step>& steps = program.lanes[0].steps;

  if (!root) steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = window(0)});
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  if (root) {
    steps.push_back({.kind = StepKind::reduce_from, .src = input(0), .dst = output(0), .group = 0});
  }
  return program;
}

}  // namespace pycoll
