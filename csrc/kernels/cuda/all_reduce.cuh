// all_reduce by hand, for where latency rules: one_shot, two_shot, one_shot_ll.
// All sum in rank order. Blocks with one index at all ranks work on one share of the vector and
// meet nobody else.
#pragma once

#include "kernels/cuda/executor_arguments.h"
#include "kernels/cuda/float_sum.cuh"
#include "kernels/cuda/waiting.cuh"
#include "kernels/element.h"

namespace pycoll::cuda {

struct AllReduceArguments {
  GroupView group;
  Call call;
  const void* input;
  void* output;
  uint64_t count;
  uint64_t share;      // elements a block, a multiple of a line
  uint32_t everybody;  // bit r: rank r
  float divisor;
};

PYCOLL_DEVICE uint32_t* counter_of_block(const GroupView& group, uint64_t array) {
  return word_at<uint32_t>(group, group.rank, array, blockIdx.x);
}

PYCOLL_DEVICE uint64_t smaller(uint64_t a, uint64_t b) {
  return a < b ? a : b;
}

// Elements [begin, end) of a vector that this block works on.
struct Share {
  uint64_t begin;
  uint64_t end;
};
PYCOLL_DEVICE Share share_of_block(const AllReduceArguments& in) {
  return {smaller(blockIdx.x * in.share, in.count), smaller((blockIdx.x + 1) * in.share, in.count)};
}

// ---- one_shot and two_shot: ranks show each other parts of their vectors in windows, which a
// block has two of and uses in turn, one a round. ----

// The part of each rank at some place of its window; this rank's is `own`.
struct PeerWindows {
  const GroupView& group;
  const void* own;
  uint64_t offset;  // bytes
  uint32_t round;
  template <class Body>
  PYCOLL_DEVICE void for_each(const Body& body) const {
    for (int32_t rank = 0; rank < group.geometry.world_size; ++rank) {
      const void* window = window_of(group, rank, blockIdx.x, round) + offset;
      body(rank == 0, rank == group.rank ? own : window);
    }
  }
};

// The same sum to one or two places.
struct TwoTargets {
  void* first;
  void* second;  // may be nullptr
  template <class Body>
  PYCOLL_DEVICE void for_each(const Body& body) const {
    body(first);
    if (second != nullptr) body(second);
  }
};

// A block's work on its share, in the registers of every thread.
template <class T>
class Rounds {
 public:
  PYCOLL_DEVICE Rounds(const AllReduceArguments& in, BlockState* state)
      : share(share_of_block(in)),
        input(static_cast<const T*>(in.input)),
        output(static_cast<T*>(in.output)),
        in_(in),
        state_(state),
        arithmetic_({in.divisor}),
        barriers_(*counter_of_block(in.group, in.group.layout.barriers)),
        round_(*counter_of_block(in.group, in.group.layout.window_rounds)) {}

  const Share share;
  const T* const input;
  T* const output;

  // Of this round.
  PYCOLL_DEVICE std::byte* window(int32_t rank) const {
    return window_of(in_.group, rank, blockIdx.x, round_);
  }
  // Of `bytes` from or to a window.
  PYCOLL_DEVICE void copy(const void* from, void* to, uint64_t bytes) const {
    copy_bytes(block_team(),
               {static_cast<const std::byte*>(from), static_cast<std::byte*>(to), nullptr}, bytes);
  }
  // Barrier `step` of a round. False: given up.
  PYCOLL_DEVICE bool meet(uint32_t step) {
    return cuda::meet(in_.group, state_, in_.call, in_.everybody, &barriers_, step);
  }
  // Of n elements at `own` and of those at `offset` bytes of the peers' windows.
  PYCOLL_DEVICE void sum(const T* own, uint64_t offset, const TwoTargets& targets,
                         uint64_t n) const {
    const bool aligned = (low_bits(own) | low_bits(targets.first) | low_bits(targets.second)) == 0;
    arithmetic_.sum(block_team(), PeerWindows{in_.group, own, offset, round_}, targets, n, aligned);
  }
  PYCOLL_DEVICE void next() { ++round_; }
  // Where the next kernel, or a replay of this one, goes on. After a barrier of the block.
  PYCOLL_DEVICE void store_counters() const {
    if (threadIdx.x != 0) return;
    *counter_of_block(in_.group, in_.group.layout.barriers) = barriers_;
    *counter_of_block(in_.group, in_.group.layout.window_rounds) = round_;
  }

 private:
  const AllReduceArguments& in_;
  BlockState* const state_;
  const FloatSum<T> arithmetic_;
  uint32_t barriers_;
  uint32_t round_;
};

// Show all, read all. One barrier a round: peers are done with the window before last when they
// come to this round's barrier.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    one_shot_kernel(PYCOLL_GRID_CONSTANT AllReduceArguments in) {
  PYCOLL_SHARED(BlockState, state, 1);
  begin_block(state);
  Rounds<T> rounds(in, state);
  const Share share = rounds.share;
  const uint64_t most = in.group.geometry.window_bytes / sizeof(T);
  uint64_t at = share.begin;
  do {  // once at least: calls on nothing still meet
    const uint64_t n = smaller(share.end - at, most);
    rounds.copy(rounds.input + at, rounds.window(in.group.rank), n * sizeof(T));
    if (!rounds.meet(0)) return;
    rounds.sum(rounds.input + at, 0, {rounds.output + at, nullptr}, n);
    rounds.next();
    at += n;
  } while (at < share.end);
  rounds.store_counters();
}

// A window holds a part for each rank: what rank p sums lies at part p of every window but p's own,
// where its result goes.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    two_shot_kernel(PYCOLL_GRID_CONSTANT AllReduceArguments in) {
  PYCOLL_SHARED(BlockState, state, 1);
  begin_block(state);
  Rounds<T> rounds(in, state);
  const Share share = rounds.share;
  const auto world = static_cast<uint64_t>(in.group.geometry.world_size);
  const auto rank = static_cast<uint64_t>(in.group.rank);
  constexpr uint64_t kLine = 64 / sizeof(T);
  const uint64_t most = in.group.geometry.window_bytes / world / sizeof(T) / kLine * kLine;
  uint64_t at = share.begin;
  do {
    const uint64_t left = share.end - at;
    const uint64_t even = ((left + world - 1) / world + kLine - 1) / kLine * kLine;
    const uint64_t part = smaller(even, most);
    const auto begin_of = [&](uint64_t p) { return smaller(at + p * part, share.end); };
    const auto bytes_of = [&](uint64_t p) { return (begin_of(p + 1) - begin_of(p)) * sizeof(T); };
    const auto window = [&](uint64_t of, uint64_t p) {
      return rounds.window(static_cast<int32_t>(of)) + p * part * sizeof(T);
    };
    for (uint64_t step = 1; step < world; ++step) {
      const uint64_t p = (rank + step) % world;
      rounds.copy(rounds.input + begin_of(p), window(rank, p), bytes_of(p));
    }
    if (!rounds.meet(0)) return;
    const uint64_t mine = begin_of(rank);
    rounds.sum(rounds.input + mine, rank * part * sizeof(T),
               {window(rank, rank), rounds.output + mine}, bytes_of(rank) / sizeof(T));
    if (!rounds.meet(1)) return;
    for (uint64_t step = 1; step < world; ++step) {
      const uint64_t p = (rank + step) % world;
      rounds.copy(window(p, p), rounds.output + begin_of(p), bytes_of(p));
    }
    rounds.next();
    at = smaller(at + world * part, share.end);
  } while (at < share.end);
  rounds.store_counters();
}

// ---- one_shot_ll: data and flag travel in one 64-bit word, so one trip is all there is. A word
// says nothing of any other memory; that its place may be written again is told by a credit,
// released when the block has read the whole round. Word 0 holds the fingerprint. ----

// What the flag of a round's words is: never 0, which words that were never written hold, also when
// rounds have wrapped. (A word that is left out for exactly 2^31 rounds, hours of nothing but such
// calls, would be taken for one of this round.)
PYCOLL_DEVICE uint32_t stamp_of(uint32_t round) {
  return round * 2 + 1;
}

PYCOLL_DEVICE uint64_t* packet_of(const GroupView& group, int32_t at, int32_t from, uint32_t round,
                                  uint64_t word) {
  const auto world = static_cast<uint64_t>(group.geometry.world_size);
  const uint64_t buffer = uint64_t{blockIdx.x} * 2 + (round & 1);
  const uint64_t row = buffer * world + static_cast<uint64_t>(from);
  return word_at<uint64_t>(group, at, group.layout.packets,
                           row * (uint64_t{group.geometry.packets} + 1) + word);
}
PYCOLL_DEVICE uint32_t* packet_credit_of(const GroupView& group, int32_t at, int32_t from) {
  const auto world = static_cast<uint64_t>(group.geometry.world_size);
  return word_at<uint32_t>(group, at, group.layout.packet_credits,
                           blockIdx.x * world + static_cast<uint64_t>(from));
}

// Four bytes of elements; nothing is read past the end.
template <class T>
struct Word {
  static constexpr int kLength = 4 / sizeof(T);
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

  static PYCOLL_DEVICE uint32_t load(const T* input, uint64_t word, uint64_t count) {
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < kLength; ++k) {
      const uint64_t i = word * kLength + static_cast<uint64_t>(k);
      if (i < count) bits |= uint32_t{element::bits_as<Bits>(input[i])} << (k * 16);
    }
    return bits;
  }
  static PYCOLL_DEVICE float element_of(uint32_t bits, int k) {
    const auto own = static_cast<Bits>(bits >> (k * 16));
    T x;
    __builtin_memcpy(static_cast<void*>(&x), &own, sizeof(T));
    return device::to_float(x);
  }
};

PYCOLL_DEVICE uint64_t await_packet(const AllReduceArguments& in, BlockState* state, int32_t peer,
                                    uint32_t round, uint64_t* packet, uint64_t seen) {
  const auto is_here = [&](uint64_t word) {
    return static_cast<uint32_t>(word >> 32) == stamp_of(round);
  };
  if (is_here(seen)) return seen;
  return wait_until(
      in.group, state, in.call, {peer, round, 0},
      [&] { return device::load_relaxed<Scope::system>(packet); }, is_here);
}

// Peers are looked at four at a time: each look takes a trip to the L2 cache.
constexpr int32_t kPeersPerLook = 4;

template <class T>
PYCOLL_DEVICE void sum_packets(const AllReduceArguments& in, BlockState* state, uint32_t round,
                               uint64_t word, uint32_t own, float (&total)[Word<T>::kLength]) {
  const GroupView& group = in.group;
  const int32_t world = group.geometry.world_size;
  for (int32_t first = 0; first < world; first += kPeersPerLook) {
    uint64_t seen[kPeersPerLook];
#pragma unroll
    for (int32_t k = 0; k < kPeersPerLook; ++k) {
      const int32_t peer = first + k;
      seen[k] = own;
      if (peer >= world || peer == group.rank) continue;
      seen[k] =
          device::load_relaxed<Scope::system>(packet_of(group, group.rank, peer, round, word));
    }
#pragma unroll
    for (int32_t k = 0; k < kPeersPerLook; ++k) {
      const int32_t peer = first + k;
      if (peer >= world) break;
      if (peer != group.rank) {
        seen[k] = await_packet(in, state, peer, round,
                               packet_of(group, group.rank, peer, round, word), seen[k]);
      }
#pragma unroll
      for (int i = 0; i < Word<T>::kLength; ++i) {
        const float x = Word<T>::element_of(static_cast<uint32_t>(seen[k]), i);
        total[i] = peer == 0 ? x : total[i] + x;
      }
    }
  }
}

// `count` and `share` as elsewhere, a share of at most Geometry::packets words.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    one_shot_ll_kernel(PYCOLL_GRID_CONSTANT AllReduceArguments in) {
  PYCOLL_SHARED(BlockState, state, 1);
  begin_block(state);
  const GroupView& group = in.group;
  const int32_t world = group.geometry.world_size;
  const uint32_t round = *counter_of_block(group, group.layout.packet_rounds) + 1;
  const Share share = share_of_block(in);
  const uint64_t n = share.end - share.begin;
  const uint64_t words = (n + Word<T>::kLength - 1) / Word<T>::kLength;
  const T* input = static_cast<const T*>(in.input) + share.begin;
  T* output = static_cast<T*>(in.output) + share.begin;
  const auto peer = static_cast<int32_t>(threadIdx.x);
  const bool has_peer = peer < world && peer != group.rank;

  if (has_peer) {
    wait_for(group, state, in.call, {peer, round - 2, 0},
             packet_credit_of(group, group.rank, peer));
  }
  __syncthreads();
  if (block_failed(state)) return;
  __syncthreads();

  const auto put = [&](int32_t to, uint64_t word, uint32_t data) {
    device::store_relaxed<Scope::system>(packet_of(group, to, group.rank, round, word),
                                         flag_of(data, stamp_of(round)));
  };
  if (has_peer) put(peer, 0, in.call.fingerprint);
  for (uint64_t word = threadIdx.x; word < words; word += blockDim.x) {
    const uint32_t data = Word<T>::load(input, word, n);
    for (int32_t step = 1; step < world; ++step) put((group.rank + step) % world, 1 + word, data);
  }
  if (has_peer) {
    uint64_t* packet = packet_of(group, group.rank, peer, round, 0);
    const uint64_t seen =
        await_packet(in, state, peer, round, packet, device::load_relaxed<Scope::system>(packet));
    if (static_cast<uint32_t>(seen) != in.call.fingerprint &&
        static_cast<uint32_t>(seen >> 32) == stamp_of(round)) {
      give_up(group, state, in.call, {peer, round, 0}, Trouble::mismatch, seen << 32 | round);
    }
  }
  __syncthreads();  // no output before all fingerprints are known
  if (block_failed(state)) return;

  const FloatSum<T> arithmetic({in.divisor});
  for (uint64_t word = threadIdx.x; word < words; word += blockDim.x) {
    float total[Word<T>::kLength] = {};
    sum_packets<T>(in, state, round, 1 + word, Word<T>::load(input, word, n), total);
    if (device::load_relaxed<Scope::block>(&state->failed) != 0) break;  // what it got is not data
#pragma unroll
    for (int k = 0; k < Word<T>::kLength; ++k) {
      const uint64_t i = word * Word<T>::kLength + static_cast<uint64_t>(k);
      if (i < n) output[i] = arithmetic.finish(total[k]);
    }
  }
  __syncthreads();
  if (block_failed(state)) return;
  if (has_peer) {
    device::store_release<Scope::system>(packet_credit_of(group, peer, group.rank), round);
  }
  if (threadIdx.x == 0) *counter_of_block(group, group.layout.packet_rounds) = round;
}

}  // namespace pycoll::cuda
