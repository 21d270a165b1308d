// A Transport that dawdles at random points, so that few operations visit many schedules, and that
// calls hooks, so that a test can make one schedule happen for certain.
//
// It wraps every call that touches a flag or a slot. It synchronises nothing between ranks:
// ThreadSanitizer would take a lock of ours for the ordering that the transport owes.
#pragma once

#include <functional>
#include <memory>

#include "transport/transport.h"

namespace pycoll::stress {

struct ChaosOptions {
  bool delays = true;
  uint64_t seed = 0;
  std::function<void()> before_prepare_sleep;
  std::function<void()> before_sleep;
  std::function<void(Transport& inner)> after_peer_abort;
  // Between two portions of work on peers' vectors.
  std::function<void()> while_borrowing;
};

std::unique_ptr<Connector> with_chaos(std::unique_ptr<Connector> inner, ChaosOptions options);

// A yield, a short spin or a sleep of microseconds; most often nothing.
class Delays {
 public:
  Delays(bool on, uint64_t seed) : on_(on), state_(seed) {}
  void maybe();

 private:
  bool on_;
  uint64_t state_;
};

}  // namespace pycoll::stress
