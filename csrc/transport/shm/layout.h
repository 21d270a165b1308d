// What lies where in a rank's shared segment.
//
//   ControlBlock | FIFOs [peer][channel] | window buffers [lane][parity]
//
// Every word below has one writer, named beside it; a rank's own segment holds what it receives and
// what it shows. Flags stand on cache lines of their own, so that a spinning reader does not slow
// the writer of something else. Pages are touched only when used (the file is sparse).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/transport.h"

namespace pycoll::shm {

constexpr size_t kLine = 64;
constexpr int kCallSlots = 64;

static_assert(std::atomic<uint64_t>::is_always_lock_free,
              "flags in shared memory must be lock-free");

// One announced call, guarded by its sequence number: 0 while it is being written. Fields are
// atomics because a reader may look while the writer overwrites; it then sees the sequence change
// and lets go.
struct CallSlot {
  std::atomic<uint64_t> sequence{0};
  std::atomic<uint64_t> words[sizeof(CallHeader) / 8]{};
};

// Flag and payload in one place. Writer: the owner.
struct alignas(kLine) Cell {
  std::atomic<uint64_t> arrival{0};
  std::byte payload[kCellBytes];
};

struct alignas(kLine) ControlBlock {
  // 1: the owner sleeps (or is about to) and wants FUTEX_WAKE. Set to 1 by the owner, to 0 by
  // anyone.
  alignas(kLine) std::atomic<uint32_t> sleeping{0};
  // The CPU the owner was last seen on, + 1; a hint. Writer: the owner.
  alignas(kLine) std::atomic<uint32_t> cpu{0};

  struct alignas(kLine) Flag {
    std::atomic<uint64_t> word{0};  // an Arrival. Writer: the owner.
  };
  Flag arrivals[kMaxLanes];

  // The owner's latest lease, guarded by its sequence number like a call. One is enough: a rank
  // that is past a call has refused (transport.h). Writer: the owner.
  struct alignas(kLine) Offer {
    std::atomic<uint64_t> sequence{0};
    std::atomic<uint64_t> terms{0};  // | granted 32 | fingerprint 32 |
    std::atomic<uint64_t> input{0};
    std::atomic<uint64_t> output{0};
  } offer;
  // 1: the owner uses its peers' memory. Writer: the owner.
  alignas(kLine) std::atomic<uint32_t> borrowing{0};
  // 1: the owner has taken its lease back, and the group is dead. Writer: the owner.
  alignas(kLine) std::atomic<uint32_t> revoked{0};

  // How far the owner has come while the group connects. Writer: the owner.
  alignas(kLine) std::atomic<int32_t> ready_stage{0};

  struct alignas(kLine) Calls {
    std::atomic<uint64_t> latest{0};  // sequence
    CallSlot slots[kCallSlots];       // by sequence % kCallSlots
  };
  Calls calls;      // Writer: the owner's thread that drives.
  Calls elsewhere;  // Writer: the owner's thread that announces such calls, which may be another.

  Cell cells[2];  // by the parity of the barrier
};

// Message i lies in slot i % depth. Counters wrap; differences count.
struct alignas(kLine) FifoControl {
  // Writer: the sender.
  alignas(kLine) std::atomic<uint32_t> published{0};
  // Writer: the receiver, whose segment this is.
  alignas(kLine) std::atomic<uint32_t> released{0};
};

struct alignas(kLine) SlotHeader {
  MessageTag tag;  // Writer: the sender, before `published`; the payload follows on the next line.
};
static_assert(sizeof(SlotHeader) == kLine);

// Offsets, a pure function of what all ranks agreed on.
class Layout {
 public:
  Layout(int world_size, const TransportGeometry& geometry)
      : geometry_(geometry),
        slot_stride_(sizeof(SlotHeader) + geometry.slot_bytes),
        fifo_stride_(fifo_bytes(depth(0))),
        peer_stride_(fifo_stride_ * kMaxChannels + fifo_bytes(depth(kMessageChannel))),
        fifos_(round_up(sizeof(ControlBlock), kPage)),
        windows_(fifos_ + peer_stride_ * static_cast<size_t>(world_size)),
        bytes_(windows_ + round_up(geometry.window_bytes, kPage) * kMaxLanes * 2) {}

  size_t bytes() const { return bytes_; }
  // Point-to-point messages have more slots: a rank that computes takes none out, and a small send
  // is not to wait for that.
  uint32_t depth(int channel) const {
    return channel == kMessageChannel ? geometry_.fifo_depth * 4 : geometry_.fifo_depth;
  }
  size_t fifo(int peer, int channel) const {
    return fifos_ + peer_stride_ * static_cast<size_t>(peer) +
           fifo_stride_ * static_cast<size_t>(channel);
  }
  size_t slot(int peer, int channel, uint32_t message) const {
    return fifo(peer, channel) + sizeof(FifoControl) + slot_stride_ * (message % depth(channel));
  }
  size_t window(int lane, int parity) const {
    return windows_ +
           round_up(geometry_.window_bytes, kPage) * (static_cast<size_t>(lane) * 2 + parity);
  }
  const TransportGeometry& geometry() const { return geometry_; }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

  size_t fifo_bytes(uint32_t depth) const {
    return round_up(sizeof(FifoControl) + depth * slot_stride_, kPage);
  }

  TransportGeometry geometry_;
  size_t slot_stride_;
  size_t fifo_stride_;
  size_t peer_stride_;
  size_t fifos_;
  size_t windows_;
  size_t bytes_;
};

}  // namespace pycoll::shm
