// A function of the user's that is told of every call of a group that has ended
// (torch.distributed's on-completion hook).
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "runtime/communicator.h"

namespace pycoll::torch_adapter {

class CompletionHook : public std::enable_shared_from_this<CompletionHook> {
 public:
  using Function = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  // Throws when there is one already. Calls that began before are not told of.
  void set(Function function);
  // Asked by every call, before it begins.
  bool is_set() const { return set_.load(std::memory_order_acquire); }

  // Calls the function once the work has ended, well or not, in the thread that ends it: of GPU
  // tensors when their stream has the work. What the function throws is written to stderr.
  void watch(c10d::Work& work);

  // Until the function has returned for all that was watched.
  void wait_for_pending(const Interrupt& interrupt);

 private:
  void call(const std::shared_ptr<c10d::WorkInfo>& info);

  Function function_;               // set once, before set_
  std::atomic<bool> set_{false};    // release: function_ is there
  std::atomic<uint64_t> count_{0};  // of watched works; relaxed: numbers to show
  std::mutex mutex_;
  std::condition_variable ended_;
  size_t pending_ = 0;  // guarded by mutex_
};

}  // namespace pycoll::torch_adapter
