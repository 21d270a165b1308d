// device.cuh under g++ and clang++: CUDA's names on top of the executor in csrc/sim.
//
// What is plain C++ here, the loads and stores of a kernel and the atomic accesses themselves, is
// what sanitizers instrument. Order between threads is told to ThreadSanitizer by AtomicAccess,
// scope by scope.
#pragma once

#include <cmath>
#include <cstring>

#include "sim/kernel_side.h"

#define PYCOLL_DEVICE inline
#undef __launch_bounds__
#define __launch_bounds__(...)
// The lambda's static gives each place in the source an address: the name of its array in each
// block.
#define PYCOLL_SHARED(T, name, n)                                       \
  auto& name = ::pycoll::sim::static_shared<T[n]>([]() -> const void* { \
    static char place;                                                  \
    return &place;                                                      \
  }())
#define PYCOLL_DYNAMIC_SHARED(T, name) \
  T* const name = static_cast<T*>(::pycoll::sim::dynamic_shared())

using pycoll::sim::blockDim;
using pycoll::sim::blockIdx;
using pycoll::sim::gridDim;
using pycoll::sim::threadIdx;

inline void __syncthreads(pycoll::sim::Place at = pycoll::sim::Place::here()) {
  pycoll::sim::sync_threads(at);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       pycoll::sim::Place at = pycoll::sim::Place::here()) {
  pycoll::sim::sync_warp(mask, at);
}

namespace pycoll::sim {

template <class Array>
Array& static_shared(const void* name) {
  return *static_cast<Array*>(shared_array(name, sizeof(Array), alignof(Array)));
}

// Lanes are shuffled within segments of `width` lanes, a power of two.
template <class T>
T shuffle_value(unsigned mask, T value, int source, Place at) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, source, at);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace pycoll::sim

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              pycoll::sim::Place at = pycoll::sim::Place::here()) {
  const int segment = pycoll::sim::lane() & ~(width - 1);
  return pycoll::sim::shuffle_value(mask, value, segment | (source & (width - 1)), at);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32,
                  pycoll::sim::Place at = pycoll::sim::Place::here()) {
  const int lane = pycoll::sim::lane(), segment = lane & ~(width - 1);
  const int source = lane ^ with;
  return pycoll::sim::shuffle_value(mask, value, source < segment + width ? source : lane, at);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32,
                   pycoll::sim::Place at = pycoll::sim::Place::here()) {
  const int lane = pycoll::sim::lane(), segment = lane & ~(width - 1);
  const int source = lane + static_cast<int>(by);
  return pycoll::sim::shuffle_value(mask, value, source < segment + width ? source : lane, at);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32,
                 pycoll::sim::Place at = pycoll::sim::Place::here()) {
  const int lane = pycoll::sim::lane(), segment = lane & ~(width - 1);
  const int source = lane - static_cast<int>(by);
  return pycoll::sim::shuffle_value(mask, value, source >= segment ? source : lane, at);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              pycoll::sim::Place at = pycoll::sim::Place::here()) {
  return pycoll::sim::ballot(mask, predicate != 0, at);
}

inline int __any_sync(unsigned mask, int predicate,
                      pycoll::sim::Place at = pycoll::sim::Place::here()) {
  return pycoll::sim::ballot(mask, predicate != 0, at) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      pycoll::sim::Place at = pycoll::sim::Place::here()) {
  return pycoll::sim::ballot(mask, predicate != 0, at) == mask;
}

namespace pycoll::device {

using sim::spin_pause;
using sim::timer_ns;
using Caller = sim::Place;

// Relaxed for the compiler and for sanitizers; AtomicAccess adds what the access orders.
template <Scope S, class T>
T load_acquire(T* p, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::load_acquire, caller});
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}

template <Scope S, class T>
T load_relaxed(T* p, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::load_relaxed, caller});
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}

template <Scope S, class T>
void store_release(T* p, std::type_identity_t<T> value, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::store_release, caller});
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

template <Scope S, class T>
void store_relaxed(T* p, std::type_identity_t<T> value, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::store_relaxed, caller});
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

template <Scope S, class T>
T fetch_add_relaxed(T* p, std::type_identity_t<T> value, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::update_relaxed, caller});
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}

template <Scope S, class T>
T fetch_add_acq_rel(T* p, std::type_identity_t<T> value, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::update_acq_rel, caller});
  return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
}

template <Scope S, class T>
T fetch_or_relaxed(T* p, std::type_identity_t<T> value, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::update_relaxed, caller});
  return __atomic_fetch_or(p, value, __ATOMIC_RELAXED);
}

template <Scope S, class T>
T fetch_max_relaxed(T* p, std::type_identity_t<T> value, Caller caller = Caller::here()) {
  sim::AtomicAccess access({p, sizeof(T), S, sim::Access::update_relaxed, caller});
  T before = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(p, &before, value, true, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED)) {
  }
  return before;
}

// Any type may be looked at through it.
using SixteenBytes = unsigned __attribute__((vector_size(16), may_alias));

PYCOLL_DEVICE void load_16_bytes(const void* from, void* to, Caller caller) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) sim::misaligned(from, 16, caller);
  *static_cast<SixteenBytes*>(to) = *static_cast<const SixteenBytes*>(from);
}

PYCOLL_DEVICE void store_16_bytes(void* to, const void* from, Caller caller) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) sim::misaligned(to, 16, caller);
  *static_cast<SixteenBytes*>(to) = *static_cast<const SixteenBytes*>(from);
}

}  // namespace pycoll::device
