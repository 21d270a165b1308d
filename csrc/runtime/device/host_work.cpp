#include "runtime/device/host_work.h"

#include <atomic>
#include <cstring>

#include "core/signals.h"

namespace pycoll::cuda {

HostWork::HostWork(const Driver& driver) : driver_(driver), words_(kSlots * sizeof(uint32_t)) {
  std::memset(words_.data(), 0, words_.size());
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { loop(); });
}

void HostWork::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  change_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void HostWork::begin(size_t slot, Work work, bool captured, cudaStream_t stream) {
  std::unique_lock lock(mutex_);
  Task& task = tasks_.emplace_back(Task{this, slot, std::move(work), captured, {}});
  task.place = std::prev(tasks_.end());
  lock.unlock();
  require(cudaLaunchHostFunc(stream, &HostWork::hand_over, &task), "cudaLaunchHostFunc");
}

void HostWork::end(size_t slot, cudaStream_t stream) {
  driver_.enqueue({wait_for(word_of(slot), 1), write(word_of(slot), 0)}, stream);
}

// By a thread of CUDA, which may not call CUDA.
void HostWork::hand_over(void* given) {
  auto* task = static_cast<Task*>(given);
  HostWork& owner = *task->owner;
  const std::lock_guard lock(owner.mutex_);
  owner.ready_.push_back(task);
  owner.change_.notify_all();  // under the lock: the owner may go as soon as the work has run
}

std::optional<Error> HostWork::run(const Task& task) const {
  try {
    task.work();
    return std::nullopt;
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(ErrorKind::system, error.what());
  }
}

// Release: the stream that sees it sees what the work has written to memory of the host.
void HostWork::open(size_t slot) const {
  std::atomic_ref(*word_of(slot)).store(1, std::memory_order_release);
}

void HostWork::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    change_.wait(lock, [&] { return stopping_ || !ready_.empty(); });
    if (stopping_) return;
    Task* const task = ready_.front();
    ready_.pop_front();
    if (failure_ || given_up_) continue;
    lock.unlock();
    const std::optional<Error> failed = run(*task);
    if (!failed) open(task->slot);
    lock.lock();
    if (failed) failure_ = failed;
    if (!task->captured) tasks_.erase(task->place);
  }
}

std::optional<Error> HostWork::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void HostWork::release() {
  {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
  }
  for (size_t slot = 0; slot < kSlots; ++slot) open(slot);
}

}  // namespace pycoll::cuda
