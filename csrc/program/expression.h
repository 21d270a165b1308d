// Sums as trees of contributions, each tree stored once: two values are computed alike if and only
// if they are the same number here.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "program/program.h"

namespace pycoll::prover {

class Expressions {
 public:
  using Id = uint32_t;

  Expressions();

  // What `rank` contributes to `chunk`.
  Id leaf(int32_t rank, int32_t chunk);
  Id sum(Id left, Id right);

  // -1: of several.
  int32_t chunk_of(Id id) const { return nodes_[id].chunk; }

  // Why `id` is not the sum over all ranks of chunk `chunk`, each exactly once; nullopt: it is.
  std::optional<std::string> not_complete(Id id, int32_t chunk, int32_t world_size) const;

  // Why a complete sum is not combined in this order; nullopt: it is. `ring`: as in
  // Program.
  std::optional<std::string> not_in_order(Id id, Order order, std::span<const int32_t> ring) const;

  // "((0 + 1) + 2)", or "a sum of 300 terms" where that would be long.
  std::string to_string(Id id) const;

 private:
  struct Node {
    Id left;  // of a leaf: kLeaf, and right is the rank
    Id right;
    uint32_t terms;  // leaves below, up to kMany
    int32_t lowest;  // rank
    int32_t chunk;   // kMixed: of several chunks
  };

  Id intern(const Node& node);
  void grow();
  bool is_leaf(Id id) const;
  std::vector<int32_t> ranks_below(Id id) const;
  std::optional<std::string> not_rank_order(Id id) const;
  std::optional<std::string> not_ring_order(Id id, std::span<const int32_t> ring) const;
  std::optional<std::string> not_one_by_one(Id id) const;
  std::optional<std::string> not_lower_first(Id id) const;

  std::vector<Node> nodes_;
  std::vector<Id> table_;  // open addressing, a power of two, kNone: free
};

}  // namespace pycoll::prover
