#include "sim/timeline.h"

#include "sim/sanitizers.h"

namespace pycoll::sim {

Timeline::Timeline() : fiber_(under_tsan() ? __tsan_create_fiber(0) : nullptr) {}

Timeline::~Timeline() {
  if (fiber_ != nullptr) __tsan_destroy_fiber(fiber_);
}

void Timeline::enter() {
  if (fiber_ == nullptr) return;
  left_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber_, kNoOrder);
}

void Timeline::leave() {
  if (fiber_ != nullptr) __tsan_switch_to_fiber(left_, kNoOrder);
}

void signal(const void* event) {
  tsan_release(event);
}
void wait(const void* event) {
  tsan_acquire(event);
}

}  // namespace pycoll::sim
