#include <array>

#include "core/error.h"
#include "program/builders.h"

namespace pycoll {
namespace {

constexpr std::array kAlgorithms{
    // collective, name, summary, needs_window, min_depth, build
    Algorithm{Collective::all_reduce, "ring",
              "reduce-scatter, then all-gather, round a ring: least traffic, 2(w-1) hops", false, 2,
              build_all_reduce_ring},
    Algorithm{Collective::all_reduce, "tree",
              "double binary tree: half the vector up and down each, about 2 log2(w) hops", false,
              1, build_all_reduce_tree},
    Algorithm{Collective::all_reduce, "recursive_doubling",
              "pairs at distance 1, 2, 4, ... exchange whole vectors: log2(w) hops", false, 1,
              build_all_reduce_recursive_doubling},
    Algorithm{Collective::all_reduce, "one_shot",
              "every rank reads every rank's vector in shared memory and sums it all", true, 1,
              build_all_reduce_one_shot},
    Algorithm{Collective::all_reduce, "two_shot",
              "every rank sums one chunk in shared memory, then reads the others' sums", true, 1,
              build_all_reduce_two_shot},
    Algorithm{Collective::all_gather, "ring", "every part travels once round the ring", false, 2,
              build_all_gather_ring},
    Algorithm{Collective::all_gather, "one_shot", "every rank reads every part in shared memory",
              true, 1, build_all_gather_one_shot},
    Algorithm{Collective::reduce_scatter, "ring",
              "partial sums travel round the ring to their owners", false, 2,
              build_reduce_scatter_ring},
    Algorithm{Collective::reduce_scatter, "one_shot",
              "every rank sums its own part over all ranks in shared memory", true, 1,
              build_reduce_scatter_one_shot},
    Algorithm{Collective::broadcast, "tree", "binomial tree from the root: log2(w) hops", false, 1,
              build_broadcast_tree},
    Algorithm{Collective::broadcast, "one_shot",
              "every rank reads the root's vector in shared memory", true, 1,
              build_broadcast_one_shot},
    Algorithm{Collective::barrier, "recursive_doubling",
              "dissemination: empty messages at distance 1, 2, 4, ...", false, 1,
              build_barrier_recursive_doubling},
    Algorithm{Collective::barrier, "one_shot", "flags in shared memory, one look at each peer's",
              true, 1, build_barrier_one_shot},
};

// One rank has nothing to combine and nobody to wait for, whatever the algorithm.
Program build_for_one_rank() {
  Program program;
  program.input_chunks = program.output_chunks = 1;
  program.lanes.push_back({{{.kind = StepKind::copy, .src = input(0), .dst = output(0)}}});
  return program;
}

void check_request(const ProgramRequest& request) {
  if (request.world_size < 1) {
    fail(ErrorKind::invalid_argument, "world_size must be at least 1, not ", request.world_size);
  }
  if (request.rank < 0 || request.rank >= request.world_size) {
    fail(ErrorKind::invalid_argument, "rank ", request.rank, " is not in 0..",
         request.world_size - 1);
  }
  if (request.root < 0 || request.root >= request.world_size) {
    fail(ErrorKind::invalid_argument, "root ", request.root, " is not in 0..",
         request.world_size - 1);
  }
}

}  // namespace

std::span<const Algorithm> algorithms() {
  return kAlgorithms;
}

const Algorithm* find_algorithm(Collective collective, std::string_view name) {
  for (const Algorithm& row : kAlgorithms) {
    if (row.collective == collective && row.name == name) return &row;
  }
  return nullptr;
}

std::string algorithm_names(Collective collective) {
  std::string names;
  for (const Algorithm& row : kAlgorithms) {
    if (row.collective != collective) continue;
    if (!names.empty()) names += ", ";
    names += row.name;
  }
  return names;
}

Program build_program(std::string_view algorithm, const ProgramRequest& request) {
  check_request(request);
  const Algorithm* row = find_algorithm(request.collective, algorithm);
  if (row == nullptr) {
    fail(ErrorKind::invalid_argument, "no algorithm \"", algorithm, "\" for ",
         name_of(request.collective), "; there are: ", algorithm_names(request.collective));
  }
  Program program = request.world_size == 1 ? build_for_one_rank() : row->build(request);
  program.collective = request.collective;
  program.algorithm = row->name;
  program.rank = request.rank;
  program.world_size = request.world_size;
  program.root = request.root;
  validate(program);
  return program;
}

}  // namespace pycoll
