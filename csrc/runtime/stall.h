// When to say that an operation gets nowhere: its timeout may be half an hour, and whoever watches
// the job wants to know after a minute whom it waits for.
#pragma once

#include <cstdint>
#include <optional>

#include "core/clock.h"

namespace pycoll {

// The clock of one operation that waits, for the thread that drives. Only time in which this
// process ran counts: who was stopped itself has not waited.
class StallWatch {
 public:
  // How far which operation has come. The clock begins anew when any of it changes.
  struct Position {
    uint64_t operation = 0;
    uint64_t progress = 0;
    bool operator==(const Position&) const = default;
  };

  // PYCOLL_STALL_WARNING, in seconds; 0: never.
  explicit StallWatch(double seconds)
      : first_(std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(seconds))) {}

  // At each look at what waits; those are much less than a second apart. True when it should be
  // said: once the time has passed, and then each time that it has doubled.
  bool look(const Position& position, Clock::time_point now);
  Nanoseconds waited() const { return waited_; }

 private:
  const Nanoseconds first_;
  std::optional<Position> at_;
  Clock::time_point looked_{};
  Nanoseconds waited_{0};
  Nanoseconds next_{0};
};

}  // namespace pycoll
