// Lines on stderr for what no call of the user's has to do with, so that no exception can tell it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/clock.h"

namespace pycoll {

// "pycoll: <text>" as one line, in one write, so that those of several ranks do not mix. Does not
// wait: where stderr is a pipe that nobody empties, the line is lost.
void write_to_stderr(const std::string& text);

// What strangers cause may come a million times: one line a minute at most is written, with the
// number of those that were not. For one thread at a time; does not wait for stderr.
class OccasionalLog {
 public:
  void say(const std::string& text);

 private:
  std::optional<Clock::time_point> last_;
  uint64_t left_out_ = 0;  // since then
};

}  // namespace pycoll
