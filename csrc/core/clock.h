// Monotonic time and deadlines.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

namespace pycoll {

using Clock = std::chrono::steady_clock;
using Nanoseconds = std::chrono::nanoseconds;

inline double to_seconds(Nanoseconds d) {
  return std::chrono::duration<double>(d).count();
}

// A century is "no limit", and does not overflow nanoseconds.
constexpr Nanoseconds kNoLimit = std::chrono::hours(24 * 365 * 100);

inline Nanoseconds saturated(std::chrono::milliseconds timeout) {
  return std::min(timeout, std::chrono::duration_cast<std::chrono::milliseconds>(kNoLimit));
}

// A point in time after which a wait gives up. Every wait has one.
class Deadline {
 public:
  static Deadline after(Nanoseconds timeout) {
    const auto now = Clock::now();
    return Deadline(now + std::clamp(timeout, Nanoseconds(0), kNoLimit));
  }

  bool passed() const { return Clock::now() >= at_; }
  Nanoseconds remaining() const {
    return std::max(Nanoseconds(0), std::chrono::duration_cast<Nanoseconds>(at_ - Clock::now()));
  }
  // For poll(2) and its kin: rounded up, so that a wait never returns just before the deadline.
  int remaining_ms(int at_most) const {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return static_cast<int>(std::min<int64_t>(ms, at_most));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

// The processor's time stamp, the same on all of its cores: a few nanoseconds to read. What it
// counts must be measured (runtime/flight.h).
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t count = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#else
  return static_cast<uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

}  // namespace pycoll
