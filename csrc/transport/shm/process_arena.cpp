// The process's arena: made once, told about every fork() of the process, never destroyed.
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>

#include "core/error.h"
#include "transport/shm/arena.h"
#include "transport/shm/peer_arena.h"

namespace pycoll::shm {
namespace {

constexpr uint64_t kMostBytes = uint64_t{64} << 30;
constexpr uint64_t kLeastBytes = uint64_t{64} << 20;

uint64_t limit_of(int resource) noexcept {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
  return limit.rlim_cur;
}

class ProcessArena {
 public:
  std::shared_ptr<Arena> get() {
    // Acquire: whoever sees the pointer sees the arena behind it, and arena_ does not change again.
    if (made_.load(std::memory_order_acquire) != nullptr) return arena_;
    const std::lock_guard lock(mutex_);
    if (!arena_ && problem_.empty()) make();
    return arena_;
  }

  Arena* existing() const noexcept { return made_.load(std::memory_order_acquire); }

  std::string problem() {
    const std::lock_guard lock(mutex_);
    return problem_;
  }

  Quarantine& quarantine() noexcept { return quarantine_; }

  // mutex_ is held across a fork, so there either is an arena that knows of it or none at all.
  void before_fork() {
    mutex_.lock();
    quarantine_.before_fork();
    if (arena_ && !is_child_) arena_->before_fork();
  }
  void after_fork_parent() {
    if (arena_ && !is_child_) arena_->after_fork_parent();
    quarantine_.after_fork_parent();
    mutex_.unlock();
  }
  void after_fork_child() {
    if (arena_ && !is_child_) {
      arena_->after_fork_child();
      is_child_ = true;
    }
    quarantine_.after_fork_child();
    mutex_.unlock();
  }

 private:
  void make() {
    // Beyond RLIMIT_FSIZE the kernel would end the process with a signal.
    uint64_t bytes = std::min({kMostBytes, address_space_share(), limit_of(RLIMIT_FSIZE)});
    for (; bytes >= kLeastBytes; bytes /= 2) {
      try {
        arena_ = Arena::make(bytes);
        made_.store(arena_.get(), std::memory_order_release);
        problem_.clear();
        return;
      } catch (const Error& error) {
        problem_ = error.what();
      }
    }
    if (problem_.empty()) {
      problem_ = "the limit on address space or on the size of files (ulimit -v, -f) is too small";
    }
  }

  std::atomic<Arena*> made_{nullptr};
  std::mutex mutex_;
  std::shared_ptr<Arena> arena_;
  std::string problem_;
  Quarantine quarantine_;
  bool is_child_ = false;  // of the process that made the arena
};

// Both are made while the library is loaded, and in this order: later, a fork() in another thread
// could miss the handlers, or come to them before there is an object.
ProcessArena* const process = new ProcessArena;

// pthread_atfork, not Python's hooks: a child that C code forked writes into its parent's tensors
// just as well.
const bool hears_of_forks =
    ::pthread_atfork([] { process->before_fork(); }, [] { process->after_fork_parent(); },
                     [] { process->after_fork_child(); }) == 0;

}  // namespace

uint64_t address_space_share() noexcept {
  const uint64_t limit = limit_of(RLIMIT_AS);
  return limit == UINT64_MAX ? limit : limit / 4;
}

std::shared_ptr<Arena> process_arena() {
  return hears_of_forks ? process->get() : nullptr;
}

Arena* existing_process_arena() noexcept {
  return process->existing();
}

Quarantine& process_quarantine() noexcept {
  return process->quarantine();
}

std::string process_arena_problem() {
  return hears_of_forks ? process->problem() : "pthread_atfork: no memory";
}

}  // namespace pycoll::shm
