// Words of a group's regions as kernels find them (layout.h says who writes which).
#pragma once

#include "device/device.cuh"
#include "kernels/cuda/layout.h"

namespace pycoll::cuda {

template <class T>
PYCOLL_DEVICE T* word_at(const GroupView& group, int32_t rank, uint64_t offset, uint64_t index) {
  return reinterpret_cast<T*>(group.region[rank] + offset) + index;
}

// Of a FIFO that ends at `owner`, in its memory; `peer` is at the other end.
PYCOLL_DEVICE uint64_t fifo_index(const GroupView& group, int32_t peer, int32_t fifo) {
  const int32_t all = group.geometry.fifos + group.geometry.message_fifos;
  return static_cast<uint64_t>(peer * all + fifo);
}

struct SlotAddress {
  uint64_t* flag;
  std::byte* data;
};

// Where message `number` (they count from 0) from `sender` lies at `receiver`.
PYCOLL_DEVICE SlotAddress slot_of(const GroupView& group, int32_t receiver, int32_t sender,
                                  int32_t fifo, uint32_t number) {
  const auto depth = static_cast<uint32_t>(group.geometry.depth);
  const uint64_t slot = fifo_index(group, sender, fifo) * depth + (number & (depth - 1));
  return {word_at<uint64_t>(group, receiver, group.layout.message_flags, slot),
          group.region[receiver] + group.layout.slots + slot * group.geometry.slot_bytes};
}

PYCOLL_DEVICE uint32_t* credit_of(const GroupView& group, int32_t sender, int32_t receiver,
                                  int32_t fifo) {
  return word_at<uint32_t>(group, sender, group.layout.credits, fifo_index(group, receiver, fifo));
}

// Where `from` announces its barriers of block `block` to `at`.
PYCOLL_DEVICE uint64_t* arrival_of(const GroupView& group, int32_t at, int32_t from,
                                   uint32_t block) {
  const auto world = static_cast<uint64_t>(group.geometry.world_size);
  return word_at<uint64_t>(group, at, group.layout.arrivals,
                           block * world + static_cast<uint64_t>(from));
}

PYCOLL_DEVICE std::byte* window_of(const GroupView& group, int32_t rank, uint32_t block,
                                   uint32_t round) {
  return group.region[rank] + group.layout.windows +
         (uint64_t{block} * 2 + (round & 1)) * group.geometry.window_bytes;
}

// A flag: the counter in the low half, the fingerprint of the call in the high half.
PYCOLL_DEVICE uint64_t flag_of(uint32_t number, uint32_t fingerprint) {
  return uint64_t{number} | uint64_t{fingerprint} << 32;
}

// Counters wrap: `seen` is `wanted` or later.
PYCOLL_DEVICE bool has_reached(uint32_t seen, uint32_t wanted) {
  return static_cast<int32_t>(seen - wanted) >= 0;
}

}  // namespace pycoll::cuda
