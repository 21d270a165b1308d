#include "program/expression.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace pycoll::prover {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
constexpr uint32_t kLeaf = kNone;
constexpr int32_t kMixed = -1;
// Counts stop here, so that a Program that doubles a sum for ever cannot overflow them.
constexpr uint32_t kMany = 1u << 24;

// Leaves of several chunks differ in `chunk` only, so it takes part.
size_t hash_of(uint32_t left, uint32_t right, int32_t chunk) {
  uint64_t key = (static_cast<uint64_t>(left) << 32 | right) * 0x9E3779B97F4A7C15u;
  key ^= static_cast<uint64_t>(static_cast<uint32_t>(chunk)) * 0xC2B2AE3D27D4EB4Fu;
  key ^= key >> 29;
  return static_cast<size_t>(key * 0xBF58476D1CE4E5B9u >> 16);
}

}  // namespace

Expressions::Expressions() : table_(1024, kNone) {}

Expressions::Id Expressions::leaf(int32_t rank, int32_t chunk) {
  return intern({kLeaf, static_cast<Id>(rank), 1, rank, chunk});
}

Expressions::Id Expressions::sum(Id left, Id right) {
  const Node& a = nodes_[left];
  const Node& b = nodes_[right];
  return intern({left, right, std::min(kMany, a.terms + b.terms), std::min(a.lowest, b.lowest),
                 a.chunk == b.chunk ? a.chunk : kMixed});
}

Expressions::Id Expressions::intern(const Node& node) {
  if (nodes_.size() * 2 >= table_.size()) grow();
  const size_t mask = table_.size() - 1;
  size_t at = hash_of(node.left, node.right, node.chunk) & mask;
  for (; table_[at] != kNone; at = (at + 1) & mask) {
    const Node& other = nodes_[table_[at]];
    if (other.left == node.left && other.right == node.right && other.chunk == node.chunk) {
      return table_[at];
    }
  }
  table_[at] = static_cast<Id>(nodes_.size());
  nodes_.push_back(node);
  return table_[at];
}

void Expressions::grow() {
  table_.assign(table_.size() * 2, kNone);
  const size_t mask = table_.size() - 1;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    size_t at = hash_of(nodes_[i].left, nodes_[i].right, nodes_[i].chunk) & mask;
    while (table_[at] != kNone) at = (at + 1) & mask;
    table_[at] = static_cast<Id>(i);
  }
}

bool Expressions::is_leaf(Id id) const {
  return nodes_[id].left == kLeaf;
}

// In order, left to right. Only for sums of few terms: the caller looks at `terms` first.
std::vector<int32_t> Expressions::ranks_below(Id id) const {
  std::vector<int32_t> ranks;
  std::vector<Id> todo{id};
  while (!todo.empty()) {
    const Id next = todo.back();
    todo.pop_back();
    if (is_leaf(next)) {
      ranks.push_back(static_cast<int32_t>(nodes_[next].right));
    } else {
      todo.push_back(nodes_[next].right);
      todo.push_back(nodes_[next].left);
    }
  }
  return ranks;
}

std::optional<std::string> Expressions::not_complete(Id id, int32_t chunk,
                                                     int32_t world_size) const {
  const Node& node = nodes_[id];
  if (node.chunk == kMixed) return "parts of different chunks are summed";
  if (node.chunk != chunk) return concat("it is of chunk ", node.chunk, ", not ", chunk);
  const uint32_t most_listed = 2 * static_cast<uint32_t>(world_size);
  if (node.terms > most_listed) return concat(node.terms, " terms for ", world_size, " ranks");
  std::vector<int32_t> times(static_cast<size_t>(world_size), 0);
  for (int32_t rank : ranks_below(id)) ++times[static_cast<size_t>(rank)];
  for (size_t rank = 0; rank < times.size(); ++rank) {
    if (times[rank] == 0) return concat("the part of rank ", rank, " is missing");
    if (times[rank] > 1)
      return concat("the part of rank ", rank, " is in it ", times[rank], " times");
  }
  return std::nullopt;
}

std::optional<std::string> Expressions::not_in_order(Id id, Order order,
                                                     std::span<const int32_t> ring) const {
  switch (order) {
    case Order::none:
      return "its Program promises no order for it";
    case Order::rank_order:
      return not_rank_order(id);
    case Order::ring_order:
      return not_ring_order(id, ring);
    case Order::lower_first:
      return not_lower_first(id);
  }
  return "unknown order";
}

std::optional<std::string> Expressions::not_rank_order(Id id) const {
  const std::vector<int32_t> ranks = ranks_below(id);
  if (ranks.front() != 0) return concat("it begins with rank ", ranks.front());
  for (size_t i = 1; i < ranks.size(); ++i) {
    if (ranks[i] == ranks[i - 1] + 1) continue;
    return concat("rank ", ranks[i], " comes after rank ", ranks[i - 1]);
  }
  return not_one_by_one(id);
}

std::optional<std::string> Expressions::not_ring_order(Id id, std::span<const int32_t> ring) const {
  const std::vector<int32_t> ranks = ranks_below(id);
  std::vector<size_t> places(ranks.size());
  for (size_t place = 0; place < places.size(); ++place) {
    places[ring.empty() ? place : static_cast<size_t>(ring[place])] = place;
  }
  for (size_t i = 1; i < ranks.size(); ++i) {
    const size_t before = places[static_cast<size_t>(ranks[i - 1])];
    if (places[static_cast<size_t>(ranks[i])] == (before + 1) % ranks.size()) continue;
    return concat("rank ", ranks[i], " comes after rank ", ranks[i - 1]);
  }
  return not_one_by_one(id);
}

// A chain adds one rank at a time, on the right.
std::optional<std::string> Expressions::not_one_by_one(Id id) const {
  for (Id at = id; !is_leaf(at); at = nodes_[at].left) {
    if (!is_leaf(nodes_[at].right)) return "a sum of several ranks is added at once";
  }
  return std::nullopt;
}

std::optional<std::string> Expressions::not_lower_first(Id id) const {
  std::vector<Id> todo{id};
  while (!todo.empty()) {
    const Id next = todo.back();
    todo.pop_back();
    if (is_leaf(next)) continue;
    const Node& node = nodes_[next];
    if (nodes_[node.right].lowest < nodes_[node.left].lowest) {
      return concat("rank ", nodes_[node.right].lowest, " stands right of rank ",
                    nodes_[node.left].lowest);
    }
    todo.push_back(node.left);
    todo.push_back(node.right);
  }
  return std::nullopt;
}

std::string Expressions::to_string(Id id) const {
  constexpr uint32_t kShown = 16;
  if (is_leaf(id)) return concat(nodes_[id].right);
  if (nodes_[id].terms > kShown) return concat("a sum of ", nodes_[id].terms, " terms");
  return concat("(", to_string(nodes_[id].left), " + ", to_string(nodes_[id].right), ")");
}

}  // namespace pycoll::prover
