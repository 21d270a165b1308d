#include "runtime/wait.h"

#include <sched.h>

#include <cmath>
#include <fstream>
#include <string>

namespace pycoll {
namespace {

constexpr int kLooksPerClock = 32;  // reading the clock costs as much as two pauses

// CPUs by the cgroup's quota; 0 when there is none. cgroup v2 first, then v1.
double cgroup_cpus() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period && quota != "max" && period > 0) return std::stod(quota) / period;
  std::ifstream quota_v1("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_v1("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double limit = 0;
  if (quota_v1 >> limit && period_v1 >> period && limit > 0 && period > 0) return limit / period;
  return 0;
}

}  // namespace

int available_cpus() {
  cpu_set_t mask;
  int cpus = 1;
  if (::sched_getaffinity(0, sizeof(mask), &mask) == 0) cpus = CPU_COUNT(&mask);
  const double quota = cgroup_cpus();
  if (quota > 0) cpus = std::min(cpus, static_cast<int>(std::ceil(quota)));
  return std::max(cpus, 1);
}

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
