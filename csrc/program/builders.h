// What the builders of algorithms share: names for the spaces, and the declarations that the
// registry's rows point to.
#pragma once

#include <numeric>

#include "program/algorithm.h"

namespace pycoll {

inline Ref input(int32_t chunk) {
  return {Space::input, chunk};
}
inline Ref output(int32_t chunk) {
  return {Space::output, chunk};
}
inline Ref acc(int32_t chunk) {
  return {Space::acc, chunk};
}
inline Ref window(int32_t chunk) {
  return {Space::window, chunk};
}

// `rank + offset` modulo world_size, for offset >= -world_size: where hosts do not matter.
inline int32_t rank_at(const ProgramRequest& request, int32_t offset) {
  return (request.rank + offset + request.world_size) % request.world_size;
}

// The group of direct steps that every rank belongs to.
inline std::vector<int32_t> everybody(int32_t world_size) {
  std::vector<int32_t> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Program build_all_reduce_ring(const ProgramRequest& request);
Program build_all_reduce_tree(const ProgramRequest& request);
Program build_all_reduce_recursive_doubling(const ProgramRequest& request);
Program build_all_reduce_halving_doubling(const ProgramRequest& request);
Program build_all_reduce_hierarchical(const ProgramRequest& request);
Program build_all_reduce_one_shot(const ProgramRequest& request);
Program build_all_reduce_two_shot(const ProgramRequest& request);
Program build_all_reduce_chain(const ProgramRequest& request);
Program build_all_gather_ring(const ProgramRequest& request);
Program build_all_gather_recursive_doubling(const ProgramRequest& request);
Program build_all_gather_direct(const ProgramRequest& request);
Program build_all_gather_one_shot(const ProgramRequest& request);
Program build_reduce_scatter_ring(const ProgramRequest& request);
Program build_reduce_scatter_recursive_halving(const ProgramRequest& request);
Program build_reduce_scatter_direct(const ProgramRequest& request);
Program build_reduce_scatter_one_shot(const ProgramRequest& request);
Program build_reduce_scatter_chain(const ProgramRequest& request);
Program build_broadcast_tree(const ProgramRequest& request);
Program build_broadcast_ring(const ProgramRequest& request);
Program build_broadcast_direct(const ProgramRequest& request);
Program build_broadcast_one_shot(const ProgramRequest& request);
Program build_reduce_tree(const ProgramRequest& request);
Program build_reduce_ring(const ProgramRequest& request);
Program build_reduce_direct(const ProgramRequest& request);
Program build_reduce_one_shot(const ProgramRequest& request);
Program build_reduce_chain(const ProgramRequest& request);
Program build_gather_direct(const ProgramRequest& request);
Program build_gather_ring(const ProgramRequest& request);
Program build_gather_one_shot(const ProgramRequest& request);
Program build_scatter_direct(const ProgramRequest& request);
Program build_scatter_ring(const ProgramRequest& request);
Program build_scatter_one_shot(const ProgramRequest& request);
Program build_all_to_all_direct(const ProgramRequest& request);
Program build_all_reduce_zero_copy(const ProgramRequest& request);
Program build_all_gather_zero_copy(const ProgramRequest& request);
Program build_reduce_scatter_zero_copy(const ProgramRequest& request);
Program build_broadcast_zero_copy(const ProgramRequest& request);
Program build_reduce_zero_copy(const ProgramRequest& request);
Program build_gather_zero_copy(const ProgramRequest& request);
Program build_scatter_zero_copy(const ProgramRequest& request);
Program build_barrier_recursive_doubling(const ProgramRequest& request);
Program build_barrier_ring(const ProgramRequest& request);
Program build_barrier_direct(const ProgramRequest& request);
Program build_barrier_one_shot(const ProgramRequest& request);

}  // namespace pycoll
