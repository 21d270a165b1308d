// What acquires and releases order, for ThreadSanitizer.
//
// ThreadSanitizer knows addresses that are released and acquired, but no scopes. So each address
// that kernels synchronise through gets a key for each scope and instance of it (this block, that
// device, the system): a release goes to the keys of all scopes that it reaches, an acquire comes
// from all that it reaches. They share one exactly if each one's scope includes the other, which is
// what PTX asks for. All other pairs stay unordered, and their data is a reported race.
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sim/kernel_side.h"

namespace pycoll::sim {

// Who accesses: a thread of that block of that device, or the host.
struct Seat {
  int device = -1;
  uint64_t block = 0;
};
inline constexpr Seat kHost{};

// Not a mutex of the library: see sanitizers.h.
class SpinLock {
 public:
  void lock();
  void unlock() { locked_.clear(std::memory_order_release); }

 private:
  std::atomic_flag locked_;
};

class ScopeKeys {
 public:
  // The one of this process: blocks of any executors may meet at an address.
  static ScopeKeys& of_process();

  // Held from before an access until what it orders is told: else an acquire could be given the
  // order of another store than the one it read.
  SpinLock& lock() { return lock_; }

  // All with the lock held. A store begins anew: what was released to the address before is what an
  // acquire can no longer read from.
  void store(const void* address);
  void release(const void* address, device::Scope scope, Seat seat);
  void acquire(const void* address, device::Scope scope, Seat seat);

 private:
  struct Key {
    device::Scope scope;
    Seat seat;  // what the scope does not tell apart is the host's
    void* sync;
  };

  SpinLock lock_;
  std::unordered_map<const void*, std::vector<Key>> keys_;
};

}  // namespace pycoll::sim
