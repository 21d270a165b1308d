// What nobody waits for: progress threads drive it. And the callbacks of what has ended.
#include <algorithm>
#include <system_error>

#include "runtime/communicator.h"

namespace pycoll {

// Whoever waits drives next; what nobody waits for is the progress thread's.
void Communicator::keep_going(Lock& lock) {
  if (!has_work()) {
    if (!unfinished() && !dead()) turn_.become_idle();
    return;
  }
  try {
    // A synchronous message may leave a grant or a credit behind that has no slot yet.
    if (queue_.empty() && posted_.empty()) start_progress_thread(lock);
  } catch (const std::system_error&) {
    // No more threads: the next call on this group drives it.
  }
  work_.notify_one();
}

// Another thread may take some of them: callbacks of this one wait at will.
void Communicator::complete_ended(Lock& lock) {
  while (!completing_.empty()) {
    std::shared_ptr<Operation> operation = std::move(completing_.front());
    completing_.pop_front();
    complete(lock, std::move(operation));
  }
}

// The operation's last reference may go here, and with it tensors, whose memory may need the GIL:
// never under the lock.
void Communicator::complete(Lock& lock, std::shared_ptr<Operation> operation) {
  const bool blocks_progress = operation->has_callback() && on_progress_thread();
  if (operation->has_callback()) {
    if (blocks_progress) --free_progress_;
    try {
      if (has_work() || !completing_.empty()) start_progress_thread(lock);
    } catch (const std::system_error&) {
      // No more threads: the queue waits until the callback is through.
    }
    // A callback may wait for an operation that has ended in the same pass: its own callback, which
    // completes the future waited for, must not stand behind this one.
    if (!completing_.empty()) work_.notify_one();
  }
  lock.unlock();
  operation->call_on_complete();
  operation->release();
  operation.reset();
  lock.lock();
  if (blocks_progress) ++free_progress_;
}

bool Communicator::on_progress_thread() const {
  return std::find(progress_ids_.begin(), progress_ids_.end(), std::this_thread::get_id()) !=
         progress_ids_.end();
}

void Communicator::start_progress_thread(Lock& /*held*/) {
  if (free_progress_ > 0 || stopping_) return;
  progress_.emplace_back([this] { progress_loop(); });
  progress_ids_.push_back(progress_.back().get_id());
  ++free_progress_;
}

void Communicator::progress_loop() {
  Lock lock(mutex_);
  while (!stopping_) {
    if (!completing_.empty()) {
      complete_ended(lock);
    } else if (driven() || !has_work()) {
      work_.wait(lock,
                 [this] { return stopping_ || !completing_.empty() || (!driven() && has_work()); });
    } else {
      drive(lock, nullptr);
    }
  }
}

void Communicator::stop_progress() {
  std::vector<std::thread> threads;
  {
    Lock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
    // A caller's thread may be driving: it sees dead_ within one sleep and leaves. This one does so
    // when it returns from here.
    ++waiters_;
    while (driven() && !in_own_interrupt()) change_.wait_for(lock, std::chrono::milliseconds(20));
    --waiters_;
    threads.swap(progress_);
  }
  for (std::thread& thread : threads) {
    if (thread.get_id() == std::this_thread::get_id()) {
      // A callback closes the group: the destructor, in another thread, joins this one.
      const Lock lock(mutex_);
      progress_.push_back(std::move(thread));
    } else {
      thread.join();
    }
  }
}

}  // namespace pycoll
