// Locks that ThreadSanitizer does not see. The order that CUDA promises between streams is told to
// it by name (signal() and wait() of sim/timeline.h); an edge through a lock of the runtime would
// order streams that CUDA leaves unordered, and hide their races.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <mutex>

#include "sim/sanitizers.h"

namespace pycoll::sim::cuda {

// Inside one Quiet: what the caller of the runtime does itself.
class Loud {
 public:
  Loud() {
    if (!under_tsan()) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  ~Loud() {
    if (!under_tsan()) return;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  Loud(const Loud&) = delete;
};

// std::mutex is intercepted by ThreadSanitizer even in files that are not instrumented.
class Mutex {
 public:
  void lock() {
    uint32_t seen = 0;
    if (state_.compare_exchange_strong(seen, 1, std::memory_order_acquire)) return;
    while (state_.exchange(2, std::memory_order_acquire) != 0) futex_wait(state_, 2, nullptr);
  }
  void unlock() {
    if (state_.exchange(0, std::memory_order_release) == 2) futex_wake(state_, 1);
  }

  static void futex_wait(std::atomic<uint32_t>& word, uint32_t value, const timespec* timeout) {
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, timeout, nullptr, 0);
  }
  static void futex_wake(std::atomic<uint32_t>& word, int waiters) {
    ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, waiters, nullptr, nullptr, 0);
  }

 private:
  std::atomic<uint32_t> state_{0};  // 0 free, 1 taken, 2 taken and somebody may sleep
};

using Lock = std::unique_lock<Mutex>;

class Condition {
 public:
  // May return for no reason.
  void wait(Lock& lock) { wait(lock, nullptr); }
  void wait_for(Lock& lock, std::chrono::microseconds time) {
    const timespec timeout{time.count() / 1000000, time.count() % 1000000 * 1000};
    wait(lock, &timeout);
  }
  // With the lock held, so that a waiter has either seen the change or reads the old sequence.
  void notify_all() {
    sequence_.fetch_add(1, std::memory_order_relaxed);
    Mutex::futex_wake(sequence_, INT_MAX);
  }

 private:
  void wait(Lock& lock, const timespec* timeout) {
    const uint32_t seen = sequence_.load(std::memory_order_relaxed);
    lock.unlock();
    Mutex::futex_wait(sequence_, seen, timeout);
    lock.lock();
  }

  std::atomic<uint32_t> sequence_{0};
};

}  // namespace pycoll::sim::cuda
