// How a rank waits for its peers: spin, then yield, then sleep.
//
// Spinning is the fastest while peers have CPUs of their own. With more ranks than CPUs it only
// keeps the peer from running, so there it is cut to almost nothing. The last stage always sleeps:
// an idle rank burns no CPU.
#pragma once

#include <cstdint>

#include "core/clock.h"

namespace pycoll {

struct WaitPolicy {
  bool crowded = false;  // more ranks than CPUs
  Nanoseconds spin{0};
  int yields = 20;
};

// spin_us < 0 chooses from the ranks on this host and the CPUs this process may use.
WaitPolicy choose_wait_policy(int ranks_on_host, int64_t spin_us);

// CPUs this process may use: affinity mask, capped by the cgroup quota (rounded up).
int available_cpus();

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

  explicit Backoff(const WaitPolicy& policy) : policy_(policy) {}
  // Spins or yields; `sleep` says that the caller should.
  Stage next();
  void reset() {
    looks_ = 0;
    yields_ = 0;
    spun_ = false;
  }

 private:
  WaitPolicy policy_;
  uint32_t looks_ = 0;
  int yields_ = 0;
  bool spun_ = false;
  Clock::time_point spin_until_{};
};

}  // namespace pycoll
