// Driving a group: one thread at a time runs its queue and its messages. Whoever waits does, or a
// progress thread (progress.cpp).
#include <algorithm>

#include "core/error.h"
#include "runtime/communicator.h"
#include "runtime/float_mode.h"
#include "runtime/overlap.h"

namespace pycoll {
namespace {

constexpr auto kInterruptPeriod = std::chrono::milliseconds(50);

// What an Interrupt threw, told apart from what the operation itself throws.
struct Interrupted {
  std::exception_ptr reason;
};

// Names this thread while it lives.
class Marked {
 public:
  explicit Marked(std::atomic<std::thread::id>& who) : who_(who) {
    who_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ~Marked() { who_.store({}, std::memory_order_relaxed); }
  Marked(const Marked&) = delete;
  Marked& operator=(const Marked&) = delete;

 private:
  std::atomic<std::thread::id>& who_;
};

void call(const Interrupt& interrupt, const ForkMark& mark) {
  if (!interrupt) return;
  try {
    interrupt();
  } catch (...) {
    if (mark.in_child()) throw;
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

std::shared_ptr<Operation> Communicator::submit(MessageRequest request) {
  check_owner();
  Lock lock(mutex_);
  start_progress_thread(lock);
  auto operation = post(lock, std::move(request));
  work_.notify_one();
  return operation;
}

void Communicator::run(CallRequest request, const Interrupt& interrupt) {
  check_owner();
  refuse_in_interrupt();
  Lock lock(mutex_);
  const auto operation = enqueue(lock, std::move(request));
  lock.unlock();
  complete_synchronously(operation, interrupt);
}

std::shared_ptr<Operation> Communicator::run(MessageRequest request, const Interrupt& interrupt) {
  check_owner();
  refuse_in_interrupt();
  Lock lock(mutex_);
  auto operation = post(lock, std::move(request));
  lock.unlock();
  complete_synchronously(operation, interrupt);
  return operation;
}

std::shared_ptr<Operation> Communicator::latest_in_conflict(const Touched& touched) const {
  const Lock lock(mutex_);
  for (auto operation = queue_.rbegin(); operation != queue_.rend(); ++operation) {
    const ExecutorInput& input = (*operation)->input_;
    // Whoever drives it may be replacing its input with a scaled one.
    const bool changes = input.call.reduce_op == ReduceOp::premul_sum;
    if (changes || in_conflict({input.input, input.output, size_of(input.call.dtype)}, touched)) {
      return *operation;
    }
  }
  return nullptr;
}

// Whoever drives looks at what is new at its next step, or is woken from its sleep for it.
void Communicator::tell_driver(Lock& /*held*/) {
  if (!driven()) return;
  // Relaxed: what is new is guarded by mutex_. wake() has the fence that pairs with the one in
  // prepare_sleep(), after which the sleeper looks at this once more.
  news_.store(true, std::memory_order_relaxed);
  transport_->wake();
}

// The caller is about to free its vectors: when this throws, the operation has ended too. In a
// child (see run_until_news) nobody else works on them.
void Communicator::complete_synchronously(const std::shared_ptr<Operation>& operation,
                                          const Interrupt& interrupt) {
  try {
    wait(operation, std::nullopt, interrupt);
  } catch (...) {
    if (!fork_mark_.in_child()) give_up(*operation);
    throw;
  }
}

Communicator::Death Communicator::interruption_of(const std::string& operation) const {
  const std::string reason = concat("rank ", rank_, " was interrupted in ", operation);
  return {reason, std::make_exception_ptr(Error(ErrorKind::aborted, reason))};
}

// Ends an operation, whoever drives it. The peers have it in their order of calls, so the group
// ends with it.
void Communicator::give_up(const Operation& operation) {
  if (operation.done()) return;
  die(interruption_of(operation.describe()));
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
    if (!limited) refuse_in_interrupt();
    const Deadline limit = Deadline::after(timeout.value_or(kNoLimit));
    Lock lock(mutex_);
    while (!operation->done()) {
      if (limited && limit.passed()) return false;
      if (!driven() && !limited) {
        drive(lock, interrupt);
        continue;
      }
      ++waiters_;
      change_.wait_for(lock, kInterruptPeriod);
      --waiters_;
      if (interrupt && !operation->done()) {
        lock.unlock();
        interrupt();
        check_owner();  // before the lock, which a child may never get
        lock.lock();
      }
    }
  }
  if (operation->error()) std::rethrow_exception(operation->error());
  return true;
}

bool Communicator::has_work() const {
  // The engine is the driver's, who looks at it himself.
  return !queue_.empty() || !posted_.empty() || (!driven() && messages_.active());
}

// Drives until something has ended, or there is nothing to drive. `thrown`: in driving the first of
// the queue, just before.
void Communicator::drive(Lock& lock, const Interrupt& interrupt, const std::exception_ptr& thrown) {
  driving_ = true;
  std::vector<Ended> ended;
  std::exception_ptr interruption;
  while (ended.empty()) {
    try {
      // The group dies of it, so once.
      if (thrown != nullptr) std::rethrow_exception(thrown);
      take_up(lock);
      if (!current_ && !messages_.active() && !messages_.has_finished()) break;
      lock.unlock();
      run_until_news(interrupt);
    } catch (...) {
      if (fork_mark_.in_child()) throw;
      if (lock.owns_lock()) lock.unlock();
      interruption = die_driving(std::current_exception());
    }
    ended = gather_ended(lock);
  }
  driving_ = false;
  Operations orphans = std::exchange(orphans_, {});
  for (const Ended& one : ended) retire(one);
  if (waiters_ > 0) change_.notify_all();
  keep_going(lock);
  for (Ended& one : ended) completing_.push_back(std::move(one.operation));
  for (auto& orphan : orphans) completing_.push_back(std::move(orphan));
  complete_ended(lock);
  if (interruption) std::rethrow_exception(interruption);
}

// Takes over what was submitted since the last look.
void Communicator::take_up(Lock& /*held*/) {
  news_.store(false, std::memory_order_relaxed);
  if (!current_ && !queue_.empty()) {
    current_ = queue_.front();
    begun_ = false;
  }
  while (!posted_.empty()) {
    const auto message = std::move(posted_.front());
    posted_.pop_front();
    messages_.post(message);
  }
}

void Communicator::begin(CollectiveOperation& operation) {
  if (flight_) flight_->started(operation.call());
  // A late call on a group that a peer has given up must not succeed by what was published before.
  if (const auto text = transport_->peer_abort()) fail(ErrorKind::aborted, *text);
  transport_->announce(operation.call());
  scale_input(operation);
  executor_.start(operation.input_);
  begun_ = true;
  moved_cpu_ = false;
  inquired_ = false;
  operation.started_ = {};
}

// premul_sum: the sum of scaled inputs. Each rank has a factor of its own, so the scaled input
// exists on this rank only. Always a copy: until ranks have compared their calls nothing of the
// caller's may be written, not even where the result goes.
void Communicator::scale_input(CollectiveOperation& operation) {
  ExecutorInput& in = operation.input_;
  if (in.kernels == nullptr || in.kernels->scale == nullptr) return;
  const size_t element = size_of(in.call.dtype);
  operation.scaled_.resize(in.input.count() * element);
  std::byte* to = operation.scaled_.data();
  for (Block& block : in.input.blocks) {
    in.kernels->scale(to, block.data, block.count, operation.premul_factor_);
    block.data = to;
    to += block.count * element;
  }
}

// One look at everything. True when something moved.
bool Communicator::advance() {
  bool moved = current_ && executor_.advance();
  if (messages_.active()) moved |= messages_.advance();
  return moved;
}

bool Communicator::something_ended() const {
  return (current_ && begun_ && executor_.done()) || messages_.has_finished();
}

// An Interrupt may run a signal handler that forks, and the child comes back here, amid a call that
// is its parent's: memory, peers and locks. So after each the owner is checked, and what is thrown
// in a child goes to the caller without anything being ended or told.
void Communicator::run_until_news(const Interrupt& interrupt) {
  const IeeeFloatMode ieee;
  if (current_ && !begun_) begin(*current_);
  Backoff backoff(wait_policy_, spin_budget_);
  while (!something_ended() && !news_.load(std::memory_order_relaxed)) {
    if (advance()) {
      backoff.reset();
      // A peer's vectors may be in use for long, and only whoever waits looks for trouble.
      if (executor_.borrows()) look_between_portions();
    } else if (!current_ && !messages_.active()) {
      return;
    } else if (backoff.next() == Backoff::Stage::sleep) {
      wait_for_peers(backoff, interrupt);
    }
  }
}

// Kills the group for what was thrown while driving. Returns an Interrupt's own exception.
std::exception_ptr Communicator::die_driving(std::exception_ptr error) {
  // Callbacks are called when this thread drives no more: one may wait for what it is driving.
  try {
    std::rethrow_exception(error);
  } catch (const Interrupted& interrupted) {
    orphans_ = end_group(interruption_of(describe_driven()));
    return interrupted.reason;
  } catch (...) {
    orphans_ = end_group(death_of(error));
    return nullptr;
  }
}

Communicator::Death Communicator::death_of(const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(error);
  } catch (const Error& caught) {
    // An abort of a peer is passed on as it is: its own note to a third rank may come after our
    // farewell, which that rank would then take for the reason.
    const bool passed_on = caught.kind() == ErrorKind::aborted;
    return {
        passed_on ? caught.what() : concat("rank ", rank_, " aborted the group: ", caught.what()),
        error};
  } catch (...) {
    // No memory, say: this rank is out of step with its peers.
    return {concat("rank ", rank_, " failed in ", describe_driven(), ": ", text_of(error)), error};
  }
}

// What the driving thread works on, for texts: the collective, or the oldest message.
std::string Communicator::describe_driven() const {
  if (current_) return current_->describe();
  if (!messages_.pending().empty()) return messages_.pending().front()->describe();
  return "point-to-point messages";
}

// Called without the lock, returns with it: everything that has ended, and how. After the group's
// death that is everything there is.
std::vector<Communicator::Ended> Communicator::gather_ended(Lock& lock) {
  std::vector<Ended> ended;
  for (auto& message : messages_.take_finished()) {
    const auto outcome = MessageEngine::outcome_of(*message);
    ended.push_back({std::move(message), outcome});
  }
  const bool died = dead();
  const bool executed = current_ && begun_ && executor_.done();
  if (died && !executed) executor_.give_up();
  if (executed) ended.push_back({current_, nullptr});
  for (Ended& one : ended) {
    if (one.error || !one.operation->base_.finalize) continue;
    try {
      one.operation->base_.finalize();
    } catch (...) {
      one.error = std::current_exception();
    }
  }
  lock.lock();
  if (!died) return ended;
  if (current_ && !executed) ended.push_back({current_, death_});
  for (auto& message : messages_.give_up()) ended.push_back({std::move(message), death_});
  return ended;
}

void Communicator::retire(const Ended& one) {
  record_end(one);
  if (one.operation == current_) {
    // die() may have emptied the queue.
    if (!queue_.empty() && queue_.front() == current_) queue_.pop_front();
    current_.reset();
  } else {
    --open_messages_;
  }
  one.operation->finish(one.error);
}

void Communicator::record_end(const Ended& one) {
  if (!flight_) return;
  const FlightState how = one.error ? FlightState::failed : FlightState::done;
  if (one.operation == current_) {
    flight_->ended(current_->sequence(), how);
  } else if (const auto* message = dynamic_cast<const MessageOperation*>(one.operation.get())) {
    flight_->ended_message(message->number(), message->matched(), how);
  }
}

// Time counts from here: a call that ends before its first long wait reads no clock.
void Communicator::start_clocks() {
  const auto start = [now = Clock::now()](Operation& operation) {
    if (operation.started_ == Clock::time_point{}) operation.started_ = now;
  };
  if (current_) start(*current_);
  for (const auto& message : messages_.pending()) start(*message);
}

// A signal handler that runs in the middle of a call would wait for what goes on when it returns.
void Communicator::refuse_in_interrupt() const {
  if (!in_own_interrupt()) return;
  fail(ErrorKind::invalid_argument, "rank ", rank_,
       ": a signal handler may not wait for a group whose call it has interrupted: that call goes "
       "on when the handler returns. Note the signal, and act on it after the call");
}

void Communicator::wait_for_peers(Backoff& backoff, const Interrupt& interrupt) {
  {
    const Marked marked(interrupted_);
    call(interrupt, fork_mark_);
  }
  check_owner();
  start_clocks();
  look_for_trouble();
  if (current_ && !moved_cpu_ && !wait_policy_.crowded) {
    // Two ranks that share a CPU run in turns until the scheduler notices, which takes it very long
    // when both yield. The higher rank moves away, once an operation.
    for (const int peer : executor_.waiting_for()) {
      if (peer < rank_ && transport_->shares_cpu_with(peer)) {
        moved_cpu_ = move_to_another_cpu();
        if (moved_cpu_) return backoff.reset();
      }
    }
  }
  look_for_stalls();
  const Nanoseconds patience = ask_when_stuck();
  transport_->prepare_sleep();
  // Also when this rank has no message under way: a peer that cannot go on with its sends before
  // their FIFO is emptied may be the one that is waited for.
  const bool drained = messages_.advance();
  // The last look: nothing that a peer does from here on is missed (transport.h).
  if (advance() || something_ended() || drained || news_.load(std::memory_order_relaxed)) {
    transport_->cancel_sleep();
    return backoff.reset();
  }
  if (dead_.load(std::memory_order_acquire)) return transport_->cancel_sleep();
  transport_->sleep(std::min<Nanoseconds>(patience, until_first_deadline()));
}

// An operation that has waited for a while asks the peers where they are, once. Returns how long to
// sleep at most.
Nanoseconds Communicator::ask_when_stuck() {
  if (!current_ || inquired_) return kInterruptPeriod * 2;
  const Nanoseconds long_enough = std::min<Nanoseconds>(kInterruptPeriod, current_->timeout_ / 4);
  const Nanoseconds waited = Clock::now() - current_->started_;
  if (waited < long_enough) return long_enough - waited;
  inquired_ = true;
  transport_->inquire();
  return long_enough;
}

}  // namespace pycoll
