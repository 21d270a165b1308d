#include "program/topology.h"

#include <algorithm>
#include <numeric>

namespace pycoll {
namespace {

// How far the subtree of place v reaches: places v to v + reach - 1, as far as there are any.
int32_t reach_of(int32_t place, int32_t world_size) {
  if (place != 0) return place & -place;
  int32_t reach = 1;
  while (reach < world_size) reach *= 2;
  return reach;
}

}  // namespace

Ring::Ring(const ProgramRequest& request)
    : rank_(request.rank),
      order_(static_cast<size_t>(request.world_size)),
      places_(static_cast<size_t>(request.world_size)) {
  std::iota(order_.begin(), order_.end(), 0);
  // Mostly ranks stand host by host already: looking is cheaper than sorting.
  if (!std::is_sorted(request.hosts.begin(), request.hosts.end())) {
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      return request.hosts[static_cast<size_t>(a)] < request.hosts[static_cast<size_t>(b)];
    });
  }
  for (size_t place = 0; place < order_.size(); ++place) {
    places_[static_cast<size_t>(order_[place])] = static_cast<int32_t>(place);
  }
}

int32_t Ring::from(int32_t rank, int32_t offset) const {
  const auto size = static_cast<int32_t>(order_.size());
  const int32_t place = places_[static_cast<size_t>(rank)] + offset + size;
  return order_[static_cast<size_t>(place % size)];
}

int32_t Ring::distance_from(int32_t rank) const {
  const auto size = static_cast<int32_t>(order_.size());
  const int32_t distance = places_[static_cast<size_t>(rank_)] - places_[static_cast<size_t>(rank)];
  return (distance + size) % size;
}

std::vector<std::vector<int32_t>> ranks_by_host(const ProgramRequest& request) {
  std::vector<std::vector<int32_t>> hosts;
  for (int32_t rank = 0; rank < request.world_size; ++rank) {
    const size_t host =
        request.hosts.empty() ? 0 : static_cast<size_t>(request.hosts[static_cast<size_t>(rank)]);
    if (hosts.size() <= host) hosts.resize(host + 1);
    hosts[host].push_back(rank);
  }
  return hosts;
}

BinomialTree::BinomialTree(int32_t rank, int32_t root, int32_t world_size) {
  const int32_t place = (rank - root + world_size) % world_size;
  const int32_t reach = reach_of(place, world_size);
  if (place != 0) parent_ = (place - reach + root) % world_size;
  for (int32_t distance = 1; distance < reach && place + distance < world_size; distance *= 2) {
    children_.push_back((place + distance + root) % world_size);
  }
}

int32_t BinomialTree::lowest_below(int32_t child, int32_t root, int32_t world_size) {
  const int32_t place = (child - root + world_size) % world_size;
  const int32_t end = std::min(place + reach_of(place, world_size), world_size);
  // Places run through the ranks from the root on and wrap round to rank 0.
  const int32_t place_of_zero = world_size - root;
  return place < place_of_zero && place_of_zero < end ? 0 : child;
}

}  // namespace pycoll
