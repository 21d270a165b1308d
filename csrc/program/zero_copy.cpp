// Collectives on the callers' vectors themselves, which lie in memory that all ranks map: nothing
// is staged. Peers' inputs are read, and of a reduction the sums are stored into peers' outputs
// too: that is twice as fast as if everybody read the sums, because a chunk passes through one
// cache only.
//
// Every Program begins after the exchange of leases, in which all ranks have come, and ends with a
// barrier: then nobody touches the vectors any more.
#include "program/builders.h"

namespace pycoll {
namespace {

Program leased(const ProgramRequest& request) {
  Program program;
  program.input_chunks = program.output_chunks = 1;
  program.needs_lease = true;
  program.groups.push_back(everybody(request.world_size));
  program.lanes.emplace_back();
  return program;
}

void end(Program& program) {
  program.lanes.front().steps.push_back({.kind = StepKind::barrier, .group = 0});
}

Step read_input(int32_t peer, int32_t chunk, Ref dst) {
  return {.kind = StepKind::copy_from,
          .dst = dst,
          .from = peer,
          .remote_chunk = chunk,
          .remote = Space::input};
}

// Rank k sums chunk k; `to` as in reduce_to.
Program sum_chunks(const ProgramRequest& request, int32_t to) {
  Program program = leased(request);
  const int32_t own = request.rank;
  program.input_chunks = program.output_chunks = request.world_size;
  program.order = Order::rank_order;
  program.lends_input = true;
  program.lends_output = to < 0 || to == own;
  program.lanes.front().steps.push_back({.kind = StepKind::reduce_to,
                                         .src = input(own),
                                         .dst = output(own),
                                         .to = to,
                                         .group = 0,
                                         .remote_chunk = own,
                                         .remote = Space::input});
  end(program);
  return program;
}

// Own part first, then the others' from the neighbour on: no vector is read by all at once.
void gather_parts(Program& program, const ProgramRequest& request) {
  std::vector<Step>& steps = program.lanes.front().steps;
  const int32_t own = request.rank;
  steps.push_back({.kind = StepKind::copy, .src = input(0), .dst = output(own)});
  for (int32_t offset = 1; offset < request.world_size; ++offset) {
    const int32_t owner = rank_at(request, offset);
    steps.push_back(read_input(owner, 0, output(owner)));
  }
}

}  // namespace

Program build_all_reduce_zero_copy(const ProgramRequest& request) {
  return sum_chunks(request, -1);
}

Program build_reduce_zero_copy(const ProgramRequest& request) {
  return sum_chunks(request, request.root);
}

Program build_reduce_scatter_zero_copy(const ProgramRequest& request) {
  Program program = leased(request);
  const int32_t own = request.rank;
  program.input_chunks = request.world_size;
  program.order = Order::rank_order;
  program.lends_input = true;
  program.lanes.front().steps.push_back({.kind = StepKind::reduce_from,
                                         .src = input(own),
                                         .dst = output(0),
                                         .group = 0,
                                         .remote_chunk = own,
                                         .remote = Space::input});
  end(program);
  return program;
}

Program build_all_gather_zero_copy(const ProgramRequest& request) {
  Program program = leased(request);
  program.output_chunks = request.world_size;
  program.lends_input = true;
  gather_parts(program, request);
  end(program);
  return program;
}

Program build_gather_zero_copy(const ProgramRequest& request) {
  Program program = leased(request);
  const bool root = request.rank == request.root;
  program.output_chunks = request.world_size;
  program.lends_input = !root;
  if (root) gather_parts(program, request);
  end(program);
  return program;
}

Program build_broadcast_zero_copy(const ProgramRequest& request) {
  Program program = leased(request);
  const bool root = request.rank == request.root;
  program.lends_input = root;
  program.lanes.front().steps.push_back(
      root ? Step{.kind = StepKind::copy, .src = input(0), .dst = output(0)}
           : read_input(request.root, 0, output(0)));
  end(program);
  return program;
}

Program build_scatter_zero_copy(const ProgramRequest& request) {
  Program program = leased(request);
  const int32_t own = request.rank;
  const bool root = own == request.root;
  program.input_chunks = request.world_size;
  program.lends_input = root;
  program.lanes.front().steps.push_back(
      root ? Step{.kind = StepKind::copy, .src = input(own), .dst = output(0)}
           : read_input(request.root, own, output(0)));
  end(program);
  return program;
}

}  // namespace pycoll
