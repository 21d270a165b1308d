#include "core/occasional_log.h"

#include <poll.h>
#include <unistd.h>

#include "core/error.h"

namespace pycoll {
namespace {

constexpr Nanoseconds kPause = std::chrono::minutes(1);

}  // namespace

void write_to_stderr(const std::string& text) {
  const std::string line = concat("pycoll: ", text, "\n");
  // Where there is room for it at once (in a pipe: a page, more than a line): the caller carries
  // messages of groups, and whoever should read the pipe may be gone.
  pollfd entry{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&entry, 1, 0) == 1 && (entry.revents & POLLOUT) != 0) {
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  }
}

void OccasionalLog::say(const std::string& text) {
  const auto now = Clock::now();
  if (last_ && now - *last_ < kPause) {
    ++left_out_;
    return;
  }
  const std::string more =
      left_out_ == 0 ? "" : concat(" (", left_out_, " more since the last such line)");
  write_to_stderr(concat(text, more));
  last_ = now;
  left_out_ = 0;
}

}  // namespace pycoll
