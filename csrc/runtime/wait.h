// How a rank waits for its peers: spin, then yield, then sleep.
//
// Spinning is the fastest while peers have CPUs of their own. With more ranks than CPUs it only
// keeps the peer from running, so there it is cut to almost nothing. The last stage always sleeps:
// an idle rank burns no CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/clock.h"

namespace pycoll {

struct WaitPolicy {
  bool crowded = false;  // more ranks than CPUs
  bool adaptive = true;  // the spin shrinks where it does not pay
  Nanoseconds longest_spin{0};
  int yields = 2;
};

// spin_us < 0 chooses from the ranks on this host and the CPUs this process may use.
WaitPolicy choose_wait_policy(int ranks_on_host, int64_t spin_us);

// How long to spin, learnt from how waits end: twice as long after a spin that met its peer, half
// as long after one that was in vain. A peer whose CPU is taken by other processes does not come
// while we spin, and is woken sooner when we sleep.
class SpinBudget {
 public:
  explicit SpinBudget(const WaitPolicy& policy)
      : adaptive_(policy.adaptive), longest_(policy.longest_spin), now_(policy.longest_spin) {}
  Nanoseconds get() const { return now_; }
  void met() {
    if (adaptive_) now_ = std::min(longest_, now_ * 2);
  }
  void in_vain() {
    if (adaptive_) now_ = std::max(std::min(kShortest, longest_), now_ / 2);
  }

 private:
  static constexpr Nanoseconds kShortest = std::chrono::microseconds(2);
  bool adaptive_;
  Nanoseconds longest_;
  Nanoseconds now_;
};

// Moves the calling thread off the CPU it runs on, once, leaving its affinity mask as it was. False
// when it may run nowhere else.
bool move_to_another_cpu();

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// The stages of one wait. The owner calls next() after each look that found nothing.
class Backoff {
 public:
  enum class Stage { spin, yield, sleep };

  Backoff(const WaitPolicy& policy, SpinBudget& budget) : policy_(policy), budget_(budget) {}
  // Spins or yields; `sleep` says that the caller should.
  Stage next();
  // Something moved: the next wait begins with spinning.
  void reset() {
    if (looks_ > 0 && !spun_) budget_.met();
    looks_ = 0;
    yields_ = 0;
    spun_ = false;
  }

 private:
  const WaitPolicy& policy_;
  SpinBudget& budget_;
  uint32_t looks_ = 0;
  int yields_ = 0;
  bool spun_ = false;
  Clock::time_point spin_until_{};
};

}  // namespace pycoll
