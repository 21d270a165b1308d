// Who stands where: the orders in which algorithms go through the ranks of a group.
#pragma once

#include <vector>

#include "program/algorithm.h"

namespace pycoll {

// The ranks in the order of (host, rank), so that a ring leaves each host once. From one rank's
// point of view: offsets count from its own place.
class Ring {
 public:
  explicit Ring(const ProgramRequest& request);

  // The rank `offset` places further on, for offset >= -world_size.
  int32_t at(int32_t offset) const { return from(rank_, offset); }
  int32_t from(int32_t rank, int32_t offset) const;
  // Places from `rank` on to this rank, 0 to world_size - 1.
  int32_t distance_from(int32_t rank) const;
  const std::vector<int32_t>& order() const { return order_; }

 private:
  int32_t rank_;
  std::vector<int32_t> order_;
  std::vector<int32_t> places_;  // of each rank
};

// The ranks of each host, in order. Without a topology there is one host.
std::vector<std::vector<int32_t>> ranks_by_host(const ProgramRequest& request);

// A binomial tree on ranks counted from the root: the parent of v is v without its lowest set bit.
class BinomialTree {
 public:
  BinomialTree(int32_t rank, int32_t root, int32_t world_size);

  int32_t parent() const { return parent_; }  // -1: it is the root
  // The child with the smallest subtree first.
  const std::vector<int32_t>& children() const { return children_; }
  // The lowest rank of the subtree below `child`.
  static int32_t lowest_below(int32_t child, int32_t root, int32_t world_size);

 private:
  int32_t parent_ = -1;
  std::vector<int32_t> children_;
};

}  // namespace pycoll
