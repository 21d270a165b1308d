#include <array>

#include "core/error.h"
#include "program/builders.h"
#include "program/topology.h"

namespace pycoll {
namespace {

constexpr std::array kAlgorithms{
    // collective, name, summary, needs_window, min_depth, build, needs_lease
    Algorithm{Collective::all_reduce, "ring",
              "reduce-scatter, then all-gather, round a ring: least traffic, 2(w-1) hops", false, 2,
              build_all_reduce_ring},
    Algorithm{Collective::all_reduce, "tree",
              "double binary tree: half the vector up and down each, about 2 log2(w) hops", false,
              1, build_all_reduce_tree},
    Algorithm{Collective::all_reduce, "recursive_doubling",
              "pairs at distance 1, 2, 4, ... exchange whole vectors: log2(w) hops", false, 1,
              build_all_reduce_recursive_doubling},
    Algorithm{Collective::all_reduce, "halving_doubling",
              "pairs halve, then double what they share: least traffic, 2 log2(w) hops", false, 1,
              build_all_reduce_halving_doubling},
    Algorithm{Collective::all_reduce, "hierarchical",
              "reduce-scatter inside hosts, rings between them, all-gather inside", false, 2,
              build_all_reduce_hierarchical},
    Algorithm{Collective::all_reduce, "one_shot",
              "every rank reads every rank's vector in shared memory and sums it all", true, 1,
              build_all_reduce_one_shot},
    Algorithm{Collective::all_reduce, "two_shot",
              "every rank sums one chunk in shared memory, then reads the others' sums", true, 1,
              build_all_reduce_two_shot},
    Algorithm{Collective::all_reduce, "chain",
              "sums up the ranks one after the other, results down: rank order, 2(w-1) hops", false,
              1, build_all_reduce_chain},
    Algorithm{Collective::all_reduce, "zero_copy",
              "every rank sums one chunk of all vectors where they lie, and stores it into all",
              true, 1, build_all_reduce_zero_copy, true},
    Algorithm{Collective::all_gather, "ring", "every part travels once round the ring", false, 2,
              build_all_gather_ring},
    Algorithm{Collective::all_gather, "recursive_doubling",
              "pairs at distance 1, 2, 4, ... exchange all they have: log2(w) hops", false, 1,
              build_all_gather_recursive_doubling},
    Algorithm{Collective::all_gather, "direct", "every rank sends its part to every other: one hop",
              false, 1, build_all_gather_direct},
    Algorithm{Collective::all_gather, "one_shot", "every rank reads every part in shared memory",
              true, 1, build_all_gather_one_shot},
    Algorithm{Collective::all_gather, "zero_copy", "every rank reads every part where it lies",
              true, 1, build_all_gather_zero_copy, true},
    Algorithm{Collective::reduce_scatter, "ring",
              "partial sums travel round the ring to their owners", false, 2,
              build_reduce_scatter_ring},
    Algorithm{Collective::reduce_scatter, "recursive_halving",
              "pairs at distance w/2, ..., 2, 1 split what they share: log2(w) hops", false, 1,
              build_reduce_scatter_recursive_halving},
    Algorithm{Collective::reduce_scatter, "direct",
              "every owner receives all contributions to its part and sums them: one hop", false, 1,
              build_reduce_scatter_direct},
    Algorithm{Collective::reduce_scatter, "one_shot",
              "every rank sums its own part over all ranks in shared memory", true, 1,
              build_reduce_scatter_one_shot},
    Algorithm{Collective::reduce_scatter, "chain",
              "sums up the ranks one after the other, the last sends them to their owners", false,
              1, build_reduce_scatter_chain},
    Algorithm{Collective::reduce_scatter, "zero_copy",
              "every rank sums its own part over all vectors where they lie", true, 1,
              build_reduce_scatter_zero_copy, true},
    Algorithm{Collective::broadcast, "tree", "binomial tree from the root: log2(w) hops", false, 1,
              build_broadcast_tree},
    Algorithm{Collective::broadcast, "ring",
              "a chain from the root round the ring, slice after slice", false, 1,
              build_broadcast_ring},
    Algorithm{Collective::broadcast, "direct", "the root sends to every rank: one hop", false, 1,
              build_broadcast_direct},
    Algorithm{Collective::broadcast, "one_shot",
              "every rank reads the root's vector in shared memory", true, 1,
              build_broadcast_one_shot},
    Algorithm{Collective::broadcast, "zero_copy",
              "every rank reads the root's vector where it lies", true, 1,
              build_broadcast_zero_copy, true},
    Algorithm{Collective::barrier, "recursive_doubling",
              "dissemination: empty messages at distance 1, 2, 4, ...", false, 1,
              build_barrier_recursive_doubling},
    Algorithm{Collective::barrier, "ring", "an empty message goes round the ring twice", false, 1,
              build_barrier_ring},
    Algorithm{Collective::barrier, "direct",
              "every rank sends every other an empty message: one hop", false, 1,
              build_barrier_direct},
    Algorithm{Collective::barrier, "one_shot", "flags in shared memory, one look at each peer's",
              true, 1, build_barrier_one_shot},
    Algorithm{Collective::reduce, "tree", "binomial tree to the root: log2(w) hops", false, 1,
              build_reduce_tree},
    Algorithm{Collective::reduce, "ring", "a chain round the ring to the root, slice after slice",
              false, 1, build_reduce_ring},
    Algorithm{Collective::reduce, "direct", "the root receives every vector and sums them: one hop",
              false, 1, build_reduce_direct},
    Algorithm{Collective::reduce, "one_shot", "the root sums every vector in shared memory", true,
              1, build_reduce_one_shot},
    Algorithm{Collective::reduce, "chain",
              "sums up the ranks one after the other, the last sends them to the root", false, 1,
              build_reduce_chain},
    Algorithm{Collective::reduce, "zero_copy",
              "every rank sums one chunk of all vectors where they lie, into the root's", true, 1,
              build_reduce_zero_copy, true},
    Algorithm{Collective::gather, "direct", "every rank sends its part to the root: one hop", false,
              1, build_gather_direct},
    Algorithm{Collective::gather, "ring", "parts travel along a chain to the root", false, 1,
              build_gather_ring},
    Algorithm{Collective::gather, "one_shot", "the root reads every part in shared memory", true, 1,
              build_gather_one_shot},
    Algorithm{Collective::gather, "zero_copy", "the root reads every part where it lies", true, 1,
              build_gather_zero_copy, true},
    Algorithm{Collective::scatter, "direct", "the root sends every rank its part: one hop", false,
              1, build_scatter_direct},
    Algorithm{Collective::scatter, "ring", "parts travel along a chain from the root", false, 1,
              build_scatter_ring},
    Algorithm{Collective::scatter, "one_shot",
              "every rank reads its part of the root in shared memory", true, 1,
              build_scatter_one_shot},
    Algorithm{Collective::scatter, "zero_copy",
              "every rank reads its part of the root where it lies", true, 1,
              build_scatter_zero_copy, true},
    Algorithm{Collective::all_to_all, "direct", "pairwise exchange at offset 1, 2, ..., w-1", false,
              1, build_all_to_all_direct},
};

// One rank has nothing to combine and nobody to wait for, whatever the algorithm.
Program build_for_one_rank() {
  Program program;
  program.input_chunks = program.output_chunks = 1;
  program.lanes.push_back({{{.kind = StepKind::copy, .src = input(0), .dst = output(0)}}});
  return program;
}

void check_hosts(const ProgramRequest& request) {
  if (request.hosts.empty()) return;
  if (request.hosts.size() != static_cast<size_t>(request.world_size)) {
    fail(ErrorKind::invalid_argument, request.hosts.size(), " hosts for ", request.world_size,
         " ranks");
  }
  int32_t seen = 0;
  for (const int32_t host : request.hosts) {
    if (host < 0 || host > seen) {
      fail(ErrorKind::invalid_argument, "host ", host, " comes before host ", seen,
           ": hosts are numbered by first appearance");
    }
    if (host == seen) ++seen;
  }
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
  check_hosts(request);
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
  if (program.order == Order::ring_order && !request.hosts.empty()) {
    program.ring = Ring(request).order();
  }
  validate(program);
  return program;
}

}  // namespace pycoll
