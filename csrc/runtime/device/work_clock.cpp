#include "runtime/device/work_clock.h"

namespace pycoll::cuda {

void WorkClock::queued(Nanoseconds limit) {
  Nanoseconds::rep least = least_.load(std::memory_order_relaxed);
  while (limit.count() < least &&
         !least_.compare_exchange_weak(least, limit.count(), std::memory_order_relaxed)) {
  }
}

bool WorkClock::is_late(const Event& last) {
  if (sampled_ && reached_.query() == cudaErrorNotReady) return Clock::now() - since_ > limit_;
  sampled_ = last.query() == cudaErrorNotReady;
  if (!sampled_) return false;
  // Behind the sample there may be calls that count now, and again in the next: as long as any.
  const Nanoseconds least(least_.exchange(kNoLimit.count(), std::memory_order_relaxed));
  if (least != kNoLimit) limit_ = least;
  since_ = Clock::now();
  require(cudaStreamWaitEvent(stream_.get(), last.get()), "cudaStreamWaitEvent");
  require(cudaEventRecord(reached_.get(), stream_.get()), "cudaEventRecord");
  return false;
}

}  // namespace pycoll::cuda
