// broadcast: every rank's output is the root's input. One chunk; its slices pipeline over rounds.
#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {
namespace {

Program one_chunk() {
  Program program;
  program.input_chunks = program.output_chunks = 1;
  program.lanes.emplace_back();
  return program;
}

// What every rank but the root does: receives, and passes on to some.
void receive_and_forward(std::vector<Step>& steps, int32_t from, const std::vector<int32_t>& to) {
  if (to.empty()) {
    steps.push_back({.kind = StepKind::recv, .dst = output(0), .from = from});
    return;
  }
  steps.push_back(
      {.kind = StepKind::recv_copy_send, .dst = output(0), .from = from, .to = to.front()});
  for (size_t i = 1; i < to.size(); ++i) {
    steps.push_back({.kind = StepKind::send, .src = output(0), .to = to[i]});
  }
}

void send_from_root(std::vector<Step>& steps, const std::vector<int32_t>& to) {
  for (const int32_t peer : to) {
    steps.push_back({.kind = StepKind::send, .src = input(0), .to = peer});
  }
  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(0)});
}

}  // namespace

Program build_broadcast_tree(const ProgramRequest& request) {
  const BinomialTree tree(request.rank, request.root, request.world_size);
  Program program = one_chunk();
  std::vector<Step>& steps = program.lanes[0].steps;
  // The child with the largest subtree first.
  const std::vector<int32_t> children(tree.children().rbegin(), tree.children().rend());
  if (tree.parent() < 0) {
    send_from_root(steps, children);
  } else {
    receive_and_forward(steps, tree.parent(), children);
  }
  return program;
}

// A chain from the root round the ring.
Program build_broadcast_ring(const ProgramRequest& request) {
  const Ring ring(request);
  Program program = one_chunk();
  std::vector<Step>& steps = program.lanes[0].steps;
  const bool last = ring.at(1) == request.root;
  if (request.rank == request.root) {
    send_from_root(steps, {ring.at(1)});
  } else {
    receive_and_forward(steps, ring.at(-1),
                        last ? std::vector<int32_t>{} : std::vector{ring.at(1)});
  }
  return program;
}

Program build_broadcast_direct(const ProgramRequest& request) {
  Program program = one_chunk();
  std::vector<Step>& steps = program.lanes[0].steps;
  if (request.rank != request.root) {
    receive_and_forward(steps, request.root, {});
    return program;
  }
  std::vector<int32_t> peers;
  for (int32_t offset = 1; offset < request.world_size; ++offset) {
    peers.push_back(rank_at(request, offset));
  }
  send_from_root(steps, peers);
  return program;
}

Program build_broadcast_one_shot(const ProgramRequest& request) {
  const bool root = request.rank == request.root;
  Program program = one_chunk();
  program.window_chunks = 1;
  program.groups.push_back(everybody(request.world_size));
  std::vector<Step>& steps = program.lanes[0].steps;

  if (root) steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = window(0)});
  steps.push_back({.kind = StepKind::barrier, .group = 0});
  if (root) {
    steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(0)});
  } else {
    steps.push_back({.kind = StepKind::copy_from, .dst = output(0), .from = request.root});
  }
  return program;
}

}  // namespace pycoll
