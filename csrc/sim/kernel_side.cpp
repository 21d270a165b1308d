#include "sim/kernel_side.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <sstream>

#include "sim/engine.h"
#include "sim/ordering.h"
#include "sim/sanitizers.h"

namespace pycoll::sim {
namespace {

struct Traits {
  bool acquires, releases, stores, is_update;
};
constexpr Traits kTraits[] = {
    {false, false, false, false},  // load_relaxed
    {true, false, false, false},   // load_acquire
    {false, false, true, false},   // store_relaxed
    {false, true, true, false},    // store_release
    {false, false, true, true},    // update_relaxed
    {true, true, true, true},      // update_acq_rel
};
const Traits& traits(Access access) {
  return kTraits[static_cast<size_t>(access)];
}

Seat seat_of(const Thread* thread) {
  if (thread == nullptr) return kHost;
  return {thread->block->grid->launch.device, thread->block->serial};
}

// Whether the access says or ends anything that ThreadSanitizer should know.
bool has_order(Access access) {
  return traits(access).acquires || traits(access).releases || access == Access::store_relaxed;
}

const char* name_of(WarpOperation operation) {
  static constexpr const char* kNames[] = {"__syncwarp", "a shuffle", "a vote"};
  return kNames[static_cast<size_t>(operation)];
}

}  // namespace

bool Place::operator==(const Place& other) const {
  return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
}

int lane() {
  return current().thread->lane();
}

// ---- Atomic accesses. ----

AtomicAccess::AtomicAccess(const What& what) : what_(what) {
  const auto [engine, thread] = current();
  if (engine != nullptr) {
    ++engine->counters().atomics;
    if (reinterpret_cast<uintptr_t>(what.address) % what.size != 0) {
      misaligned(what.address, what.size, what.at);
    }
    if (engine->schedule().one_in(engine->preempt_one_in())) engine->suspend(*thread);
  }
  // The access itself is relaxed (on_simulator.cuh); with these fences it orders memory on the CPU,
  // for peers in other OS threads.
  const Traits& does = traits(what.access);
  if (does.releases) std::atomic_thread_fence(std::memory_order_release);
  if (!under_tsan() || !has_order(what.access)) return;
  ScopeKeys& keys = ScopeKeys::of_process();
  keys.lock().lock();
  if (does.stores && !does.is_update) keys.store(what.address);
  if (does.releases) keys.release(what.address, what.scope, seat_of(thread));
}

AtomicAccess::~AtomicAccess() {
  const auto [engine, thread] = current();
  const Traits& does = traits(what_.access);
  if (under_tsan() && has_order(what_.access)) {
    ScopeKeys& keys = ScopeKeys::of_process();
    if (does.acquires) keys.acquire(what_.address, what_.scope, seat_of(thread));
    keys.lock().unlock();
  }
  if (does.acquires) std::atomic_thread_fence(std::memory_order_acquire);
  if (engine != nullptr && does.stores) engine->progressed();
}

void misaligned(const void* address, size_t alignment, Place at) {
  const auto [engine, thread] = current();
  std::ostringstream why;
  if (thread != nullptr) {
    why << "thread " << thread->number;
  } else {
    why << "the host";
  }
  why << " accesses " << alignment << " bytes at " << address << ", which is not a multiple, at "
      << at.file << ':' << at.line;
  if (engine == nullptr) end_process("simt: " + why.str() + "\n");
  engine->fail(why.str(), thread->block);
}

void spin_pause(Place at) {
  const auto [engine, thread] = current();
  if (engine == nullptr) {  // the host waits
    ::sched_yield();
    return;
  }
  thread->place = at;
  thread->spinning = true;
  engine->spun(*thread);
  engine->suspend(*thread);
  thread->spinning = false;
}

uint64_t timer_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

// ---- Barriers. ----

void sync_threads(Place at) {
  const auto [engine, thread] = current();
  Block& block = *thread->block;
  ++engine->counters().barriers;
  thread->place = at;
  if (block.arrived == 0) {
    block.barrier = at;
  } else if (!(block.barrier == at)) {
    engine->fail("threads of a block are at different __syncthreads (divergence)", &block);
  }
  if (block.live < block.threads.size()) {
    engine->fail("__syncthreads after threads of the block have exited (divergence)", &block);
  }
  const char* const key = &block.keys[block.syncs % 2];
  tsan_release(key);
  if (++block.arrived < block.live) {
    engine->block(*thread, ThreadState::at_barrier);
  } else {
    block.arrived = 0;
    ++block.syncs;
    engine->progressed();
    for (Thread& each : block.threads) {
      if (each.state == ThreadState::at_barrier) engine->wake(each);
    }
    if (engine->schedule().random()) engine->suspend(*thread);
  }
  tsan_acquire(key);
}

// ---- Warp operations. ----

namespace {

WarpGroup& group_of(Thread& thread, unsigned mask) {
  auto& groups = thread.block->warps[thread.number / 32];
  for (const auto& group : groups) {
    if (group->mask == mask) return *group;
  }
  Quiet quiet;
  groups.push_back(std::make_unique<WarpGroup>());
  groups.back()->mask = mask;
  return *groups.back();
}

// What hardware leaves undefined.
void check(const Engine& engine, const Thread& thread, const WarpGroup& group,
           WarpOperation operation, Place at) {
  const Block& block = *thread.block;
  const size_t first = thread.number / 32 * 32;
  if ((group.mask >> thread.lane() & 1) == 0) {
    engine.fail("a lane is not in the mask that it names", &block);
  }
  for (size_t i = 0; i < 32; ++i) {
    if ((group.mask >> i & 1) == 0) continue;
    if (first + i >= block.threads.size()) {
      engine.fail("a mask names lanes that the last warp of the block does not have", &block);
    }
    if (block.threads[first + i].state == ThreadState::exited) {
      engine.fail("a mask names a lane that has exited", &block);
    }
  }
  if (group.arrived != 0 && (group.operation != operation || !(group.place == at))) {
    std::ostringstream why;
    why << "lanes of one mask are at different warp operations: " << name_of(group.operation)
        << " at " << group.place.file << ':' << group.place.line << " and " << name_of(operation)
        << " at " << at.file << ':' << at.line;
    engine.fail(why.str(), &block);
  }
}

// All have arrived: each gets its result, and those that wait can go on.
void complete(Engine& engine, Thread& last, WarpGroup& group) {
  constexpr uint64_t kRubbish = 0xdeadbeefdeadbeefu;
  Block& block = *last.block;
  const size_t first = last.number / 32 * 32;
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if ((group.mask >> i & 1) != 0 && group.bits[i] != 0) votes |= 1u << i;
  }
  group.arrived = 0;
  ++group.syncs;
  engine.progressed();
  for (size_t i = 0; i < 32; ++i) {
    if ((group.mask >> i & 1) == 0) continue;
    Thread& each = block.threads[first + i];
    const int source = each.source & 31;
    each.votes = votes;
    each.bits = (group.mask >> source & 1) != 0 ? group.bits[source] : kRubbish;
    if (&each != &last) engine.wake(each);
  }
}

struct Contribution {
  unsigned mask;
  WarpOperation operation;
  uint64_t bits = 0;
  int source = 0;
};

// Returns when all lanes of the mask have come; the result is in the thread.
Thread& join(const Contribution& mine, Place at) {
  const auto [engine, thread] = current();
  ++engine->counters().warp_operations;
  thread->place = at;
  thread->mask = mine.mask;
  thread->source = mine.source;
  WarpGroup& group = group_of(*thread, mine.mask);
  check(*engine, *thread, group, mine.operation, at);
  group.operation = mine.operation;
  group.place = at;
  group.bits[thread->lane()] = mine.bits;
  group.arrived |= 1u << thread->lane();
  const char* const key =
      mine.operation == WarpOperation::sync ? &group.keys[group.syncs % 2] : nullptr;
  if (key != nullptr) tsan_release(key);
  if (group.arrived != mine.mask) {
    engine->block(*thread, ThreadState::at_warp_operation);
  } else {
    complete(*engine, *thread, group);
    if (engine->schedule().one_in(2)) engine->suspend(*thread);
  }
  if (key != nullptr) tsan_acquire(key);
  return *thread;
}

}  // namespace

void sync_warp(unsigned mask, Place at) {
  join({mask, WarpOperation::sync}, at);
}

uint64_t shuffle(unsigned mask, uint64_t bits, int source, Place at) {
  return join({mask, WarpOperation::shuffle, bits, source}, at).bits;
}

unsigned ballot(unsigned mask, bool predicate, Place at) {
  return join({mask, WarpOperation::ballot, predicate}, at).votes;
}

// ---- Shared memory. ----

void* shared_array(const void* name, size_t bytes, size_t alignment) {
  Quiet quiet;
  Array& array = current().thread->block->arrays[name];
  if (array == nullptr) array = make_array(bytes, alignment);
  return array.get();
}

void* dynamic_shared() {
  return current().thread->block->dynamic.get();
}

}  // namespace pycoll::sim
