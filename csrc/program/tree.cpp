// all_reduce by two binary trees, one for each half of the vector (Sanders, Speck and Traeff,
// "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009). A rank that has
// children in one tree is a leaf of the other, so each sends and receives about as much as a
// ring's. Reduce-up and broadcast-down are lanes of their own, so that the next slice goes up while
// the last one comes down. Tree t uses channel t: up and down are the two directions of a pair.
#include <algorithm>

#include "program/builders.h"

namespace pycoll {
namespace {

// The place of one rank in one tree.
struct Place {
  int32_t parent = -1;
  std::vector<int32_t> children;
};

// A search tree on 0..size-1 in which every even number is a leaf: the root of m numbers is the
// one after the largest perfect tree (2^k - 1 numbers) that leaves room for it.
Place place_in_search_tree(int32_t node, int32_t size) {
  const auto root_of = [](int32_t begin, int32_t end) {
    int32_t power = 1;
    while (power * 2 <= end - begin) power *= 2;
    return begin + power - 1;
  };
  Place place;
  int32_t begin = 0;
  int32_t end = size;
  for (int32_t at = root_of(begin, end); at != node; at = root_of(begin, end)) {
    place.parent = at;
    (node < at ? end : begin) = node < at ? at : at + 1;
  }
  if (begin < node) place.children.push_back(root_of(begin, node));
  if (node + 1 < end) place.children.push_back(root_of(node + 1, end));
  return place;
}

// Tree 0 is the search tree. Tree 1 is the same one with the ranks renumbered so that odd and even
// change places: mirrored when world_size is even, else shifted by one.
class Tree {
 public:
  Tree(int32_t index, int32_t world_size) : index_(index), world_size_(world_size) {}

  Place place_of(int32_t rank) const {
    Place place = place_in_search_tree(node_of(rank), world_size_);
    if (place.parent >= 0) place.parent = rank_of(place.parent);
    for (int32_t& child : place.children) child = rank_of(child);
    std::sort(place.children.begin(), place.children.end());
    return place;
  }

  bool is_leaf(int32_t rank) const { return place_of(rank).children.empty(); }

  int32_t lowest_below(int32_t rank) const {
    int32_t lowest = rank;
    for (int32_t child : place_of(rank).children) lowest = std::min(lowest, lowest_below(child));
    return lowest;
  }

 private:
  int32_t node_of(int32_t rank) const {
    if (index_ == 0) return rank;
    return world_size_ % 2 == 0 ? world_size_ - 1 - rank : (rank + world_size_ - 1) % world_size_;
  }
  int32_t rank_of(int32_t node) const {
    if (index_ == 0) return node;
    return world_size_ % 2 == 0 ? world_size_ - 1 - node : (node + 1) % world_size_;
  }

  int32_t index_;
  int32_t world_size_;
};

// Sums what the children send with this rank's part; the last sum goes on to the parent or, at the
// root, is the result and starts its way down.
std::vector<Step> reduce_up(const Tree& tree, int32_t rank, int32_t chunk) {
  const Place place = tree.place_of(rank);
  std::vector<Step> steps;
  if (place.children.empty()) {
    steps.push_back(
        {.kind = StepKind::send, .src = input(chunk), .to = place.parent, .channel = chunk});
    return steps;
  }
  const bool root = place.parent < 0;
  Ref own = input(chunk);
  int32_t lowest = rank;
  for (int32_t child : place.children) {
    const bool last = child == place.children.back();
    const int32_t lowest_received = tree.lowest_below(child);
    Step step{.kind = StepKind::recv_reduce,
              .src = own,
              .dst = acc(chunk),
              .from = child,
              .channel = chunk,
              .wire = tree.is_leaf(child) ? Wire::value : Wire::partial,
              .received_first = lowest_received < lowest};
    if (last) {
      step.kind = root ? StepKind::recv_reduce_copy_send : StepKind::recv_reduce_send;
      step.dst = root ? output(chunk) : Ref{};
      step.to = root ? child : place.parent;
    }
    steps.push_back(step);
    own = acc(chunk);
    lowest = std::min(lowest, lowest_received);
  }
  if (root && place.children.size() == 2) {
    steps.push_back({.kind = StepKind::send,
                     .src = output(chunk),
                     .to = place.children.front(),
                     .channel = chunk});
  }
  return steps;
}

std::vector<Step> broadcast_down(const Tree& tree, int32_t rank, int32_t chunk) {
  const Place place = tree.place_of(rank);
  std::vector<Step> steps;
  if (place.parent < 0) return steps;
  if (place.children.empty()) {
    steps.push_back(
        {.kind = StepKind::recv, .dst = output(chunk), .from = place.parent, .channel = chunk});
    return steps;
  }
  steps.push_back({.kind = StepKind::recv_copy_send,
                   .dst = output(chunk),
                   .from = place.parent,
                   .to = place.children.front(),
                   .channel = chunk});
  if (place.children.size() == 2) {
    steps.push_back({.kind = StepKind::send,
                     .src = output(chunk),
                     .to = place.children.back(),
                     .channel = chunk});
  }
  return steps;
}

}  // namespace

Program build_all_reduce_tree(const ProgramRequest& request) {
  Program program;
  program.input_chunks = program.output_chunks = program.acc_chunks = program.channels = 2;
  program.order = Order::lower_first;
  for (int32_t chunk = 0; chunk < 2; ++chunk) {
    const Tree tree(chunk, request.world_size);
    program.lanes.push_back({reduce_up(tree, request.rank, chunk)});
    std::vector<Step> down = broadcast_down(tree, request.rank, chunk);
    if (!down.empty()) program.lanes.push_back({std::move(down)});
  }
  return program;
}

}  // namespace pycoll
