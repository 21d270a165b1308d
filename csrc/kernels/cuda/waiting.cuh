// How a kernel waits for its peers, and how it gives up.
//
// Every wait is bounded and looks at the host's abort word now and then. A thread that gives up
// says so to its block (BlockState::failed), which ends at its next __syncthreads; the other blocks
// of the rank see the rank's `failed` word. Counters are left as they are: after a failure a group
// is dead.
#pragma once

#include "kernels/cuda/region.cuh"

namespace pycoll::cuda {

using device::Scope;

// Between two looks at the abort word, which lies in host memory: a microsecond away.
constexpr uint32_t kSpinsPerLook = 1024;

// What a thread waits for, for the record.
struct Awaited {
  int32_t peer;
  uint32_t expected;
  uint32_t step;
};

// Of a block, in shared memory.
struct BlockState {
  uint32_t failed;
};

// Called by every thread of the block.
PYCOLL_DEVICE void begin_block(BlockState* state) {
  if (threadIdx.x == 0) state->failed = 0;
  __syncthreads();
}

PYCOLL_DEVICE void write_record(const GroupView& group, const Call& call, const Awaited& awaited,
                                Trouble trouble, uint64_t seen) {
  ErrorRecord* record = &group.host->error;
  const auto put = [](uint32_t* word, uint32_t value) {
    device::store_relaxed<Scope::system>(word, value);
  };
  put(&record->rank, static_cast<uint32_t>(group.rank));
  put(&record->peer, static_cast<uint32_t>(awaited.peer));
  put(&record->collective, call.collective);
  put(&record->sequence, call.sequence);
  put(&record->block, blockIdx.x);
  put(&record->step, awaited.step);
  put(&record->expected, awaited.expected);
  put(&record->seen, static_cast<uint32_t>(seen));
  put(&record->theirs, static_cast<uint32_t>(seen >> 32));
  device::store_release<Scope::system>(&record->trouble, static_cast<uint32_t>(trouble));
}

// The first of a rank writes the record; all blocks of the rank end.
PYCOLL_DEVICE void give_up(const GroupView& group, BlockState* state, const Call& call,
                           const Awaited& awaited, Trouble trouble, uint64_t seen) {
  device::store_relaxed<Scope::block>(&state->failed, 1u);
  uint32_t* failed = word_at<uint32_t>(group, group.rank, group.layout.failed, 0);
  const bool first = device::fetch_or_relaxed<Scope::device>(failed, 1u) == 0;
  if (first) write_record(group, call, awaited, trouble, seen);
}

// Why a wait that began at `begun` ends without success; none: it goes on.
PYCOLL_DEVICE Trouble trouble_of(const GroupView& group, const Call& call, uint64_t begun) {
  uint32_t* failed = word_at<uint32_t>(group, group.rank, group.layout.failed, 0);
  if (device::load_relaxed<Scope::device>(failed) != 0) return Trouble::aborted;
  if (device::load_relaxed<Scope::system>(&group.host->abort) != 0) return Trouble::aborted;
  return device::timer_ns() - begun > call.timeout_ns ? Trouble::timed_out : Trouble::none;
}

// Looks until ready(what was seen), and returns that. Whoever calls must look at block_failed()
// after the next __syncthreads: the wait may have been given up.
template <class Look, class Ready>
PYCOLL_DEVICE auto wait_until(const GroupView& group, BlockState* state, const Call& call,
                              const Awaited& awaited, const Look& look, const Ready& ready) {
  auto seen = look();
  if (ready(seen)) return seen;
  const uint64_t begun = device::timer_ns();
  for (uint32_t spins = 1; !ready(seen); ++spins) {
    if (spins % kSpinsPerLook == 0) {
      const Trouble trouble = trouble_of(group, call, begun);
      if (trouble != Trouble::none) {
        give_up(group, state, call, awaited, trouble, seen);
        return seen;
      }
    }
    device::spin_pause();
    seen = look();
  }
  return seen;
}

// Until the counter in the low half of `*flag` has reached what is awaited.
template <class T>
PYCOLL_DEVICE T wait_for(const GroupView& group, BlockState* state, const Call& call,
                         const Awaited& awaited, T* flag) {
  return wait_until(
      group, state, call, awaited, [&] { return device::load_acquire<Scope::system>(flag); },
      [&](T seen) { return has_reached(static_cast<uint32_t>(seen), awaited.expected); });
}

// A flag that is exactly what is awaited carries the fingerprint of this very call.
PYCOLL_DEVICE void check_fingerprint(const GroupView& group, BlockState* state, const Call& call,
                                     const Awaited& awaited, uint64_t seen, uint32_t fingerprint) {
  const bool same_number = static_cast<uint32_t>(seen) == awaited.expected;
  if (same_number && static_cast<uint32_t>(seen >> 32) != fingerprint) {
    give_up(group, state, call, awaited, Trouble::mismatch, seen);
  }
}

// True, in all threads or none, when a thread of the block gave up. Called after a __syncthreads;
// and there must be another before any thread waits again, or some would see a later failure here.
PYCOLL_DEVICE bool block_failed(BlockState* state) {
  return device::load_relaxed<Scope::block>(&state->failed) != 0;
}

// A barrier of the blocks with this index at the ranks in `members`; `number` counts this block's
// barriers and lies in every thread's register. What any thread did before at any member is visible
// after it. False: given up.
PYCOLL_DEVICE bool meet(const GroupView& group, BlockState* state, const Call& call,
                        uint32_t members, uint32_t* number, uint32_t step) {
  const uint32_t mine = ++*number;
  __syncthreads();
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer < group.geometry.world_size && peer != group.rank && (members >> peer & 1) != 0) {
    const Awaited awaited{peer, mine, step};
    device::store_release<Scope::system>(arrival_of(group, peer, group.rank, blockIdx.x),
                                         flag_of(mine, call.fingerprint));
    const uint64_t seen =
        wait_for(group, state, call, awaited, arrival_of(group, group.rank, peer, blockIdx.x));
    check_fingerprint(group, state, call, awaited, seen, call.fingerprint);
  }
  __syncthreads();
  return !block_failed(state);
}

}  // namespace pycoll::cuda
