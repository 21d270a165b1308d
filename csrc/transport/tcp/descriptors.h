// The descriptors that this process holds for TCP, so that a forked child can close them.
//
// A child that keeps a socket open keeps it alive: when the parent dies, its peers see no end of
// file. So nothing may open a descriptor and be forked before the table knows of it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace pycoll::tcp {

class Descriptors {
 public:
  // Enters what `make` returns, unless that is negative. `make` must not wait.
  int open(const std::function<int()>& make);
  void close(int fd);

  // A leaf: nothing else is locked under it.
  void before_fork() { mutex_.lock(); }
  void after_fork_parent() { mutex_.unlock(); }
  void after_fork_child();

 private:
  std::mutex mutex_;
  std::set<int> open_;
};

// Owns a descriptor of the table.
class Socket {
 public:
  Socket() = default;
  // Fails by being empty, with errno set.
  Socket(std::shared_ptr<Descriptors> table, const std::function<int()>& make)
      : table_(std::move(table)), fd_(table_->open(make)) {}
  Socket(Socket&& other) noexcept
      : table_(std::move(other.table_)), fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0) table_->close(fd_);
    fd_ = -1;
  }

 private:
  std::shared_ptr<Descriptors> table_;
  int fd_ = -1;
};

}  // namespace pycoll::tcp
