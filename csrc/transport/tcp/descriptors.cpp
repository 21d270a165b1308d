#include "transport/tcp/descriptors.h"

#include <unistd.h>

#include <cerrno>

namespace pycoll::tcp {

int Descriptors::open(const std::function<int()>& make) {
  const std::lock_guard lock(mutex_);
  const int fd = make();
  if (fd >= 0) {
    const int saved = errno;
    open_.insert(fd);
    errno = saved;
  }
  return fd;
}

void Descriptors::close(int fd) {
  const std::lock_guard lock(mutex_);
  // Not there: closed for a forked child already, in which the number may be another file's by now.
  if (open_.erase(fd) != 0) ::close(fd);
}

void Descriptors::after_fork_child() {
  for (const int fd : open_) ::close(fd);
  open_.clear();
  mutex_.unlock();
}

}  // namespace pycoll::tcp
