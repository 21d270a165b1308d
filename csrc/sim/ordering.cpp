#include "sim/ordering.h"

#include <sched.h>

#include <cstdlib>

#include "sim/sanitizers.h"

namespace pycoll::sim {
namespace {

using device::Scope;

constexpr Scope kScopes[] = {Scope::block, Scope::device, Scope::system};

bool reaches(Scope scope, Scope narrower) {
  return scope >= narrower;
}

// Where the keys of that scope are one and the same.
Seat instance(Scope scope, Seat seat) {
  if (scope == Scope::system) return kHost;
  if (scope == Scope::device) return {seat.device, 0};
  return seat;
}

}  // namespace

void SpinLock::lock() {
  while (locked_.test_and_set(std::memory_order_acquire)) ::sched_yield();
}

ScopeKeys& ScopeKeys::of_process() {
  static auto* const keys = new ScopeKeys;  // never destroyed: threads may outlive main
  return *keys;
}

void ScopeKeys::store(const void* address) {
  Quiet quiet;
  const auto found = keys_.find(address);
  if (found == keys_.end()) return;
  // Freeing is what makes ThreadSanitizer forget.
  for (const Key& key : found->second) std::free(key.sync);
  found->second.clear();
}

void ScopeKeys::release(const void* address, Scope scope, Seat seat) {
  Quiet quiet;
  std::vector<Key>& keys = keys_[address];
  for (const Scope each : kScopes) {
    if (!reaches(scope, each) || (seat.device < 0 && each != Scope::system)) continue;
    const Seat place = instance(each, seat);
    Key* key = nullptr;
    for (Key& have : keys) {
      if (have.scope == each && have.seat.device == place.device &&
          have.seat.block == place.block) {
        key = &have;
      }
    }
    if (key == nullptr) key = &keys.emplace_back(Key{each, place, std::malloc(8)});
    tsan_release(key->sync);
  }
  // Instrumented atomics of the host know the address itself.
  if (scope == Scope::system) tsan_release(address);
}

void ScopeKeys::acquire(const void* address, Scope scope, Seat seat) {
  Quiet quiet;
  const auto found = keys_.find(address);
  if (found == keys_.end()) return;
  for (const Key& key : found->second) {
    const Seat place = instance(key.scope, seat);
    if (reaches(scope, key.scope) && key.seat.device == place.device &&
        key.seat.block == place.block) {
      tsan_acquire(key.sync);
    }
  }
}

}  // namespace pycoll::sim
