#include "torch/completion_hook.h"

#include <exception>

#include "core/error.h"
#include "core/occasional_log.h"
#include "runtime/pending.h"

namespace pycoll::torch_adapter {

void CompletionHook::set(Function function) {
  const std::lock_guard lock(mutex_);
  if (set_.load(std::memory_order_relaxed)) {
    fail(ErrorKind::invalid_argument, "the group has an on-completion hook already");
  }
  function_ = std::move(function);
  set_.store(true, std::memory_order_release);
}

void CompletionHook::watch(c10d::Work& work) {
  const auto start = std::chrono::steady_clock::now();
  const uint64_t number = count_.fetch_add(1, std::memory_order_relaxed) + 1;
  {
    const std::lock_guard lock(mutex_);
    ++pending_;
  }
  const auto type = work.retrieveOpType();
  work.getFuture()->addCallback(
      [self = shared_from_this(), type, number, start](c10::ivalue::Future&) {
        const auto end = std::chrono::steady_clock::now();
        self->call(std::make_shared<c10d::WorkInfo>(type, number, start, end, end - start));
      },
      /*uses_future=*/false);
}

void CompletionHook::call(const std::shared_ptr<c10d::WorkInfo>& info) {
  try {
    function_(info);
  } catch (const std::exception& error) {
    write_to_stderr(concat("the on-completion hook has failed: ", error.what()));
  }
  const std::lock_guard lock(mutex_);
  --pending_;
  ended_.notify_all();
}

void CompletionHook::wait_for_pending(const Interrupt& interrupt) {
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, kLook, [this] { return pending_ == 0; })) {
    lock.unlock();
    if (interrupt) interrupt();
    lock.lock();
  }
}

}  // namespace pycoll::torch_adapter
