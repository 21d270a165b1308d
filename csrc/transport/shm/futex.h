// futex(2) on words that several processes map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>

#include "core/clock.h"

namespace pycoll::shm {

inline uint32_t* futex_address(std::atomic<uint32_t>& word) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return reinterpret_cast<uint32_t*>(&word);
}

// Returns when woken, when the word is not `expected`, after `at_most`, or for no reason at all.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, Nanoseconds at_most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
  const timespec limit{static_cast<time_t>(seconds.count()),
                       static_cast<long>((at_most - seconds).count())};
  ::syscall(SYS_futex, futex_address(word), FUTEX_WAIT, expected, &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, futex_address(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace pycoll::shm
