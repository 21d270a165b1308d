// A grid while it runs: its blocks, their warps and threads.
#pragma once

#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "sim/fiber.h"
#include "sim/kernel_side.h"
#include "sim/simt.h"

namespace pycoll::sim {

struct Block;

enum class ThreadState : uint8_t { ready, at_barrier, at_warp_operation, exited };

struct Thread {
  Thread(Stack stack, void (*entry)(), const FiberFactory& factory)
      : fiber(stack, entry, factory) {}

  Fiber fiber;
  Block* block = nullptr;
  unsigned number = 0;  // in the block
  uint3 index{};
  ThreadState state = ThreadState::ready;
  Place place;            // where it last waited
  bool spinning = false;  // it waits for another thread's store
  // The last time it spun, as a count of changes (Engine): it has seen nothing new since.
  uint64_t stuck_since = 0;

  // ---- Of the warp operation that it is in. ----
  unsigned mask = 0;
  int source = 0;
  uint64_t bits = 0;
  unsigned votes = 0;

  int lane() const { return static_cast<int>(number % 32); }
};

enum class WarpOperation : uint8_t { sync, shuffle, ballot };

// The lanes of one mask. Kept from one operation to the next, because the keys' addresses are what
// ThreadSanitizer knows the group by.
struct WarpGroup {
  unsigned mask = 0;
  unsigned arrived = 0;
  WarpOperation operation{};
  Place place;
  uint64_t bits[32] = {};
  // sync_warp: released when a lane arrives, acquired when it leaves. Two that alternate, because a
  // lane may arrive at the next operation while another has not yet left this one.
  unsigned syncs = 0;
  char keys[2] = {};
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Array = std::unique_ptr<void, Free>;

// The threads of a block that can run, in the order in which they became so.
class ReadyQueue {
 public:
  explicit ReadyQueue(size_t threads) : slots_(threads) {}

  bool empty() const { return count_ == 0; }
  size_t size() const { return count_; }
  void push(Thread* thread) { slots_[(head_ + count_++) % slots_.size()] = thread; }
  // The n-th takes the first one's place in the order.
  Thread* pop(size_t n) {
    std::swap(slots_[head_], slots_[(head_ + n) % slots_.size()]);
    Thread* const thread = slots_[head_];
    head_ = (head_ + 1) % slots_.size();
    --count_;
    return thread;
  }

 private:
  std::vector<Thread*> slots_;  // as many as there are threads: pushing never allocates
  size_t head_ = 0, count_ = 0;
};

struct LiveGrid {
  explicit LiveGrid(Grid launched) : launch(std::move(launched)) {}

  Grid launch;
  uint64_t begun = 0;  // blocks
  uint64_t ended = 0;
  char start_key = 0;  // what the kernel comes after
  char end_key = 0;    // what comes after the kernel

  uint64_t blocks() const { return uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z; }
};

struct Block {
  Block(LiveGrid* of, size_t size) : grid(of), ready(size) {}

  LiveGrid* grid;
  uint3 index{};
  uint64_t serial = 0;  // no other block in the process has it
  std::deque<Thread> threads;
  size_t live = 0;
  ReadyQueue ready;
  bool active = false;  // in the schedule's list

  // ---- __syncthreads: how many have arrived, where, and keys as in WarpGroup. ----
  size_t arrived = 0;
  Place barrier;
  unsigned syncs = 0;
  char keys[2] = {};

  std::vector<std::vector<std::unique_ptr<WarpGroup>>> warps;
  std::map<const void*, Array> arrays;  // static shared memory by name
  Array dynamic;
};

// Exactly `bytes` long, so that AddressSanitizer sees the first byte beyond; all 0xff: NaN in every
// floating-point format.
Array make_array(size_t bytes, size_t alignment);

}  // namespace pycoll::sim
