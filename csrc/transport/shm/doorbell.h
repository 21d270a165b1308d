// How a rank sleeps until a peer has done something, without missing it.
//
// Release and acquire do not suffice here, not even on x86: the sleeper writes `sleeping` and then
// reads flags, the waker writes a flag and then reads `sleeping`. Each store may still sit in its
// CPU's store buffer while the load is done, so that both read the old value: the sleeper sleeps
// on, the waker does not wake. A sequentially consistent fence between store and load on BOTH sides
// excludes that. ThreadSanitizer does not see this kind of bug; models/doorbell.pml does, with the
// store buffer explicit.
#pragma once

#include <atomic>

#include "transport/shm/futex.h"

namespace pycoll::shm {

// Sleeper: announce. The caller then looks at all flags once more before sleep().
inline void prepare_sleep(std::atomic<uint32_t>& sleeping) {
  sleeping.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

inline void cancel_sleep(std::atomic<uint32_t>& sleeping) {
  sleeping.store(0, std::memory_order_relaxed);
}

inline void sleep(std::atomic<uint32_t>& sleeping, Nanoseconds at_most) {
  futex_wait(sleeping, 1, at_most);
  sleeping.store(0, std::memory_order_relaxed);
}

// Waker: call after the flag was stored. Costs a fence and a load when nobody sleeps.
inline void wake_if_sleeping(std::atomic<uint32_t>& sleeping) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleeping.load(std::memory_order_relaxed) != 0) {
    sleeping.store(0, std::memory_order_relaxed);
    futex_wake_all(sleeping);
  }
}

}  // namespace pycoll::shm
