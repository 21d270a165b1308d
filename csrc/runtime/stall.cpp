#include "runtime/stall.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/occasional_log.h"
#include "runtime/communicator.h"

namespace pycoll {
namespace {

// Looks are a tenth of a second apart at most, unless this process did not run in between.
constexpr Nanoseconds kLongestLook = std::chrono::milliseconds(500);
constexpr const char* kAdvice =
    ". Nothing is wrong if that rank is only slow; `pycoll status` shows what each process does, "
    "PYCOLL_STALL_WARNING sets after how many seconds this is said";

}  // namespace

bool StallWatch::look(const Position& position, Clock::time_point now) {
  if (first_ <= Nanoseconds(0)) return false;
  if (at_ != position) {
    at_ = position;
    waited_ = Nanoseconds(0);
    next_ = first_;
  } else {
    waited_ += std::min<Nanoseconds>(now - looked_, kLongestLook);
  }
  looked_ = now;
  if (waited_ < next_) return false;
  next_ = waited_ * 2;
  return true;
}

// At each look of a driver that is about to sleep. A receive from any source is not watched:
// whoever serves others may wait for their requests as long as it takes.
void Communicator::look_for_stalls() {
  const auto now = Clock::now();
  if (current_ && collective_stall_.look({current_->sequence(), executor_.progress()}, now)) {
    warn_of_stall(collective_stall_, *current_, ", for " + whom_it_waits_for(*current_));
  }
  for (const auto& message : messages_.pending()) {
    if (messages_.waiting_for(*message).size() != 1) continue;
    // It has no number of its own; when it began to wait tells it from others.
    const auto id = static_cast<uint64_t>(message->started_.time_since_epoch().count());
    if (message_stall_.look({id, message->moved()}, now)) {
      warn_of_stall(message_stall_, *message, ": " + messages_.why_waiting(*message));
    }
    break;  // those behind the oldest may be waiting for it
  }
}

void Communicator::warn_of_stall(const StallWatch& stall, const Operation& operation,
                                 const std::string& why) const {
  const double waited = std::round(to_seconds(stall.waited()) * 10) / 10;
  write_to_stderr(concat("rank ", rank_, " of group ", name_, " has waited for ", waited, " s in ",
                         operation.describe(), " of ", world_size_, " ranks", why, " (timeout ",
                         to_seconds(operation.timeout_), " s)", kAdvice));
}

}  // namespace pycoll
