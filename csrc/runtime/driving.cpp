// Whose thread runs the queue, and how: callers that wait, and progress threads.
#include <algorithm>
#include <system_error>

#include "core/error.h"
#include "runtime/communicator.h"
#include "runtime/float_mode.h"

namespace pycoll {
namespace {

constexpr auto kInterruptPeriod = std::chrono::milliseconds(50);

// What an Interrupt threw, told apart from what the operation itself throws.
struct Interrupted {
  std::exception_ptr reason;
};

void call(const Interrupt& interrupt) {
  if (!interrupt) return;
  try {
    interrupt();
  } catch (...) {
    throw Interrupted{std::current_exception()};
  }
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace

std::shared_ptr<Operation> Communicator::submit(CallRequest request) {
  check_owner();
  Lock lock(mutex_);
  // First: an operation that is queued will run, so nothing may fail after that.
  start_progress_thread(lock);
  auto operation = enqueue(lock, std::move(request));
  work_.notify_one();
  return operation;
}

void Communicator::run(CallRequest request, const Interrupt& interrupt) {
  check_owner();
  std::shared_ptr<Operation> operation;
  {
    Lock lock(mutex_);
    operation = enqueue(lock, std::move(request));
  }
  try {
    wait(operation, std::nullopt, interrupt);
  } catch (...) {
    give_up(*operation);
    throw;
  }
}

std::exception_ptr Communicator::die_interrupted(const Operation& operation) {
  const std::string reason =
      concat("rank ", rank_, " was interrupted in ", to_string(operation.call()));
  const auto error = std::make_exception_ptr(Error(ErrorKind::aborted, reason));
  die(reason, error, true);
  return error;
}

// The caller of a synchronous operation is about to free its vectors: the operation must have
// ended, whoever drives it. The peers have it in their order of calls, so the group ends with it.
void Communicator::give_up(const Operation& operation) {
  if (operation.done()) return;
  die_interrupted(operation);
  Lock lock(mutex_);
  ++waiters_;
  // Whoever drives it sees dead_ within one sleep.
  while (!operation.done()) change_.wait_for(lock, std::chrono::milliseconds(20));
  --waiters_;
}

bool Communicator::wait(const std::shared_ptr<Operation>& operation,
                        std::optional<Nanoseconds> timeout, const Interrupt& interrupt) {
  if (!operation->done()) {
    check_owner();
    // A caller that only looks for a moment must not get stuck in driving.
    const bool limited = timeout.has_value();
    const Deadline limit = Deadline::after(timeout.value_or(kNoLimit));
    Lock lock(mutex_);
    while (!operation->done()) {
      if (limited && limit.passed()) return false;
      if (!driving_ && !limited) {
        drive(lock, interrupt);
        continue;
      }
      ++waiters_;
      change_.wait_for(lock, kInterruptPeriod);
      --waiters_;
      if (interrupt && !operation->done()) {
        lock.unlock();
        interrupt();
        lock.lock();
      }
    }
  }
  if (operation->error()) std::rethrow_exception(operation->error());
  return true;
}

void Communicator::drive(Lock& lock, const Interrupt& interrupt) {
  std::shared_ptr<Operation> operation = queue_.front();
  driving_ = true;
  lock.unlock();
  std::exception_ptr interruption;
  const std::exception_ptr error = outcome_of(*operation, interrupt, interruption);
  lock.lock();
  driving_ = false;
  // die() has ended every queued operation and emptied the queue.
  if (!queue_.empty() && queue_.front() == operation) queue_.pop_front();
  operation->finish(error);
  if (waiters_ > 0) change_.notify_all();
  if (!queue_.empty()) work_.notify_one();
  complete(lock, std::move(operation));
  if (interruption) std::rethrow_exception(interruption);
}

std::exception_ptr Communicator::outcome_of(Operation& operation, const Interrupt& interrupt,
                                            std::exception_ptr& interruption) {
  try {
    execute(operation, interrupt);
  } catch (const Interrupted& interrupted) {
    interruption = interrupted.reason;
    return die_interrupted(operation);
  } catch (const Error& caught) {
    const auto error = std::current_exception();
    // An abort of a peer is passed on as it is: its own note to a third rank may come after our
    // farewell, which that rank would then take for the reason.
    const bool passed_on = caught.kind() == ErrorKind::aborted;
    die(passed_on ? caught.what() : concat("rank ", rank_, " aborted the group: ", caught.what()),
        error, true);
    return error;
  } catch (...) {
    // No memory, say: this rank is out of step with its peers.
    const auto error = std::current_exception();
    die(concat("rank ", rank_, " failed in ", to_string(operation.call()), ": ", text_of(error)),
        error, true);
    return error;
  }
  try {
    if (operation.request_.finalize) operation.request_.finalize();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// The operation's last reference may go here, and with it tensors, whose memory may need the GIL:
// never under the lock.
void Communicator::complete(Lock& lock, std::shared_ptr<Operation> operation) {
  const bool blocks_progress = operation->has_callback() && on_progress_thread();
  if (blocks_progress) {
    --free_progress_;
    try {
      if (!queue_.empty()) start_progress_thread(lock);
    } catch (const std::system_error&) {
      // No more threads: the queue waits until the callback is through.
    }
  }
  lock.unlock();
  operation->call_on_complete();
  operation->release();
  operation.reset();
  lock.lock();
  if (blocks_progress) ++free_progress_;
}

void Communicator::execute(Operation& operation, const Interrupt& interrupt) {
  const IeeeFloatMode ieee;
  // A late call on a group that a peer has given up must not succeed by what was published before.
  if (const auto text = transport_->peer_abort()) fail(ErrorKind::aborted, *text);
  transport_->announce(operation.call());
  executor_.start(operation.input_);
  moved_cpu_ = false;
  started_ = Clock::now();
  Backoff backoff(wait_policy_, spin_budget_);
  while (!executor_.done()) {
    if (executor_.advance()) {
      backoff.reset();
    } else if (backoff.next() == Backoff::Stage::sleep) {
      wait_for_peers(operation, backoff, interrupt);
    }
  }
}

void Communicator::wait_for_peers(Operation& operation, Backoff& backoff,
                                  const Interrupt& interrupt) {
  call(interrupt);
  look_for_trouble(operation);
  if (!moved_cpu_ && !wait_policy_.crowded) {
    // Two ranks that share a CPU run in turns until the scheduler notices, which takes it very long
    // when both yield. The higher rank moves away, once an operation.
    for (const int peer : executor_.waiting_for()) {
      if (peer < rank_ && transport_->shares_cpu_with(peer)) {
        moved_cpu_ = move_to_another_cpu();
        if (moved_cpu_) return backoff.reset();
      }
    }
  }
  transport_->prepare_sleep();
  // The last look: nothing that a peer does from here on is missed (transport.h).
  if (executor_.advance() || executor_.done()) {
    transport_->cancel_sleep();
    return backoff.reset();
  }
  if (dead_.load(std::memory_order_acquire)) return transport_->cancel_sleep();
  transport_->sleep(std::min<Nanoseconds>(until_deadline(operation), kInterruptPeriod * 2));
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
    if (driving_ || queue_.empty()) {
      work_.wait(lock, [this] { return stopping_ || (!driving_ && !queue_.empty()); });
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
    // A caller's thread may be driving: it sees dead_ within one sleep and leaves.
    ++waiters_;
    while (driving_) change_.wait_for(lock, std::chrono::milliseconds(20));
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
