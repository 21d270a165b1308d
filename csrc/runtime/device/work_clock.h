// How long work of a group has been under way, where nothing on the device looks at a clock.
#pragma once

#include <atomic>

#include "core/clock.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {

// Samples: an event behind all that is queued at that time. The next is taken when that one has
// been reached. So nothing is added to calls, launches of graphs count as well, and what never ends
// is found after its limit and at most what was queued before it.
class WorkClock {
 public:
  // A call was queued that may take so long from now on. By any thread.
  void queued(Nanoseconds limit);
  // Whether something that is still under way has passed its limit. `last`: the end of all that is
  // queued. By one thread at a time; never waits.
  bool is_late(const Event& last);

 private:
  const Stream stream_;
  const Event reached_;
  bool sampled_ = false;
  Clock::time_point since_{};
  Nanoseconds limit_ = kNoLimit;  // of what the sample is the end of
  // The least since the last sample. Relaxed: a number, which orders nothing.
  std::atomic<Nanoseconds::rep> least_{kNoLimit.count()};
};

}  // namespace pycoll::cuda
