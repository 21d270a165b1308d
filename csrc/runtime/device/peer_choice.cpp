#include "runtime/device/peer_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace pycoll::cuda {
namespace {

// The model. A call of p ranks on a vector of n bytes costs
//
//   trips * rounds * kTripBytes + traffic * n       bytes that cross a link
//
// where a trip is what a flag needs from one GPU to another, traffic is what the busiest GPU sends
// or receives, and all links between GPUs are alike and full-duplex (a switch, or all to all).
// Trips that follow each other:
//
//   1  LL: data and flag in one store
//   3  a barrier, and then a read of what lies at the peer: there and back
//   3  a message: its release waits until the data is there (there and back), then the flag
//
// Rows over windows begin a round whenever these are full; messages flow, so theirs count once.
// What it leaves out: copies inside a GPU, which are ten times as fast; launches, which cost all
// the same.
//
// The one number, from data sheets and not measured: 0.7 us at 375 GB/s.
constexpr double kTripBytes = 256 << 10;

enum class Window : uint8_t { none, vector, block_a_rank };

struct Row {
  Collective collective;
  const char* algorithm;
  FastAllReduce fast;  // a kernel of its own, for types that have one; nullptr: the Program
  bool in_rank_order;
  // Trips: at any world size, and for each peer.
  double trips = 0;
  double trips_per_peer = 0;
  // Traffic in vectors: at any world size, for each peer, and if each rank has a part of it.
  double whole = 0;
  double per_peer = 0;
  double parts = 0;
  // What goes through a window of its length: none, the vector, or a block of it a rank.
  Window window = Window::none;
};

constexpr auto kAllReduce = Collective::all_reduce;
constexpr Row kRows[] = {
    {kAllReduce, "one_shot_ll", &all_reduce_one_shot_ll, true, 1, 0, 0, 2, 0, Window::none},
    {kAllReduce, "one_shot", &all_reduce_one_shot, true, 3, 0, 0, 1, 0, Window::vector},
    {kAllReduce, "two_shot", &all_reduce_two_shot, true, 6, 0, 0, 0, 2, Window::vector},
    {kAllReduce, "one_shot", nullptr, true, 3, 0, 0, 1, 0, Window::vector},
    {kAllReduce, "two_shot", nullptr, true, 6, 0, 0, 0, 2, Window::vector},
    {kAllReduce, "ring", nullptr, false, 0, 6, 0, 0, 2, Window::none},
    {Collective::all_gather, "one_shot", nullptr, true, 3, 0, 0, 0, 1, Window::block_a_rank},
    {Collective::all_gather, "ring", nullptr, true, 0, 3, 0, 0, 1, Window::none},
    {Collective::reduce_scatter, "one_shot", nullptr, true, 3, 0, 0, 0, 1, Window::vector},
    {Collective::reduce_scatter, "ring", nullptr, false, 0, 3, 0, 0, 1, Window::none},
    {Collective::broadcast, "one_shot", nullptr, true, 3, 0, 0, 1, 0, Window::vector},
    {Collective::broadcast, "ring", nullptr, true, 0, 3, 1, 0, 0, Window::none},
    // The only ways.
    {Collective::reduce, "one_shot", nullptr, true},
    {Collective::gather, "direct", nullptr, true},
    {Collective::scatter, "direct", nullptr, true},
    {Collective::all_to_all, "direct", nullptr, true},
    {Collective::barrier, "one_shot", nullptr, true},
};

// Bytes of a vector that go through the windows of all blocks in a round.
double round_bytes(const Row& row, const Geometry& g) {
  const int blocks = row.fast != nullptr ? g.blocks : std::max(1, g.blocks / kMaxLanes);
  const double windows = static_cast<double>(blocks) * g.window_bytes;
  return row.window == Window::block_a_rank ? windows * g.world_size : windows;
}

double cost_of(const Row& row, const PeerCall& call, const Geometry& g) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto bytes = static_cast<double>(call.bytes);
  const double peers = g.world_size - 1;
  if (row.collective != call.collective || (row.fast != nullptr && !call.fast)) return kNever;
  if (call.determinism == Determinism::algorithm && !row.in_rank_order) return kNever;
  if (row.fast == &all_reduce_one_shot_ll && call.bytes > one_shot_ll_limit(g)) return kNever;
  double rounds = 1;
  if (row.window != Window::none) rounds = std::max(1.0, std::ceil(bytes / round_bytes(row, g)));
  const double traffic = row.whole + row.per_peer * peers + row.parts * peers / g.world_size;
  return (row.trips + row.trips_per_peer * peers) * rounds * kTripBytes + traffic * bytes;
}

}  // namespace

PeerChoice choose_for_peers(const PeerCall& call, const Geometry& geometry) {
  const Row* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Row& row : kRows) {
    const double cost = cost_of(row, call, geometry);
    if (cost >= least) continue;  // of equals the first
    best = &row;
    least = cost;
  }
  if (best == nullptr) fail(ErrorKind::not_implemented, name_of(call.collective), " on GPUs");
  return {best->algorithm, best->fast};
}

}  // namespace pycoll::cuda
