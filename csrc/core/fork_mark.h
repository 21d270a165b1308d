// Tells an object in a forked child from the original, without a system call.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>

#include "core/fd.h"

namespace pycoll {

// A page that the kernel clears in a forked child (MADV_WIPEONFORK, Linux 4.14). Where it does not,
// the process id is compared, which costs a system call.
class ForkMark {
 public:
  ForkMark() : owner_(::getpid()) {
    const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    void* page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    page_ = Mapping(page, bytes);
    if (::madvise(page, bytes, MADV_WIPEONFORK) != 0) return;
    mark_ = new (page) std::atomic<uint32_t>(1);
  }

  // Relaxed: the kernel clears it while the child has one thread, before that runs.
  bool in_child() const {
    if (mark_ != nullptr) return mark_->load(std::memory_order_relaxed) == 0;
    return ::getpid() != owner_;
  }

 private:
  const pid_t owner_;
  Mapping page_;
  const std::atomic<uint32_t>* mark_ = nullptr;
};

}  // namespace pycoll
