#include "runtime/wait.h"

#include <sched.h>

#include "core/cpus.h"

namespace pycoll {
namespace {

constexpr int kLooksPerClock = 32;  // reading the clock costs as much as two pauses

}  // namespace

WaitPolicy choose_wait_policy(int ranks_on_host, int64_t spin_us) {
  WaitPolicy policy;
  policy.crowded = ranks_on_host > available_cpus();
  policy.adaptive = spin_us < 0 && !policy.crowded;
  policy.longest_spin =
      std::chrono::microseconds(spin_us >= 0 ? spin_us : (policy.crowded ? 1 : 100));
  // Among ranks that share CPUs a yield runs a peer. With a CPU for each, only strangers gain by
  // it.
  policy.yields = policy.crowded ? 60 : 2;
  return policy;
}

bool move_to_another_cpu() {
  cpu_set_t allowed;
  const int here = ::sched_getcpu();
  if (here < 0 || ::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  cpu_set_t others = allowed;
  CPU_CLR(here, &others);
  if (CPU_COUNT(&others) == 0) return false;
  // Setting a mask without this CPU migrates the thread before the call returns.
  if (::sched_setaffinity(0, sizeof(others), &others) != 0) return false;
  ::sched_setaffinity(0, sizeof(allowed), &allowed);
  return true;
}

Backoff::Stage Backoff::next() {
  if (!spun_) {
    if (looks_ == 0) spin_until_ = Clock::now() + budget_.get();
    if (++looks_ % kLooksPerClock != 0 || Clock::now() < spin_until_) {
      cpu_relax();
      return Stage::spin;
    }
    spun_ = true;
    budget_.in_vain();
  }
  if (yields_ == policy_.yields) return Stage::sleep;
  ++yields_;
  ::sched_yield();
  return Stage::yield;
}

}  // namespace pycoll
