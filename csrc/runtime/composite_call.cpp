#include "runtime/composite_call.h"

#include <algorithm>

#include "core/error.h"

namespace pycoll {

void CompositeCall::start() {
  try {
    begin();
  } catch (...) {
    note(std::current_exception());
  }
}

bool CompositeCall::enter() {
  const std::lock_guard lock(mutex_);
  if (error_) return false;
  ++open_;
  return true;
}

// Whoever begins an operation is in one that is not over, or in start(): so this is not the last.
void CompositeCall::withdraw() {
  const std::lock_guard lock(mutex_);
  --open_;
}

void CompositeCall::adopt(RequestBase& part, Steps steps) {
  part.timeout = base_.timeout;
  const auto self = shared_from_this();
  const auto succeeded = std::make_shared<bool>(false);
  part.finalize = [self, succeeded, then = std::move(steps.then)] {
    *succeeded = true;
    try {
      if (then) then();
    } catch (...) {
      self->note(std::current_exception());
    }
  };
  part.on_complete = [self, succeeded, after = std::move(steps.after),
                      throw_why = std::move(steps.throw_why)] {
    if (!*succeeded) {
      try {
        throw_why();
        fail(ErrorKind::aborted, "a part of the call failed");
      } catch (...) {
        self->note(std::current_exception());
      }
    }
    if (after) after();
    self->leave();
  };
}

void CompositeCall::submit(Communicator& lane, CallRequest request, std::function<void()> then,
                           std::function<void()> after) {
  adopt(request, {std::move(then), std::move(after), [&lane] { lane.throw_if_dead(); }});
  if (!enter()) return;
  try {
    lane.submit(std::move(request));
  } catch (...) {
    note(std::current_exception());
    withdraw();
  }
}

void CompositeCall::note(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

void CompositeCall::fail_with(const std::exception_ptr& error) {
  note(error);
  tell_home();
}

std::shared_ptr<CallHome> CompositeCall::home() const {
  const std::lock_guard lock(mutex_);
  return home_;
}

void CompositeCall::tell_home() {
  std::exception_ptr error;
  std::shared_ptr<CallHome> home;
  {
    const std::lock_guard lock(mutex_);
    if (!error_ || told_ || !home_) return;
    told_ = true;
    error = error_;
    home = home_;
  }
  home->give_up(error);
}

void CompositeCall::leave() {
  tell_home();
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    if (--open_ > 0) return;
    failed = error_ != nullptr;  // who waits may still set it
  }
  // The last one: nobody else touches the request now.
  try {
    if (!failed && base_.finalize) base_.finalize();
  } catch (...) {
    // An error of this call alone, as without parts.
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    told_ = true;
  }
  settle();
  std::shared_ptr<CallHome> home;
  {
    const std::lock_guard lock(mutex_);
    home = std::move(home_);
  }
  home->ended();
  // Before anyone is told, who may then drop the last reference but this.
  home.reset();
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    ended_.notify_all();
  }
  const auto on_complete = std::exchange(base_.on_complete, nullptr);
  base_.finalize = nullptr;
  base_.keep_alive.reset();
  if (on_complete) on_complete();
}

bool CompositeCall::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr CompositeCall::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool CompositeCall::wait(std::optional<Nanoseconds> timeout, const Interrupt& interrupt) {
  if (fork_mark_->in_child()) {
    fail(ErrorKind::invalid_argument, "rank ", rank_,
         ": this process was forked after the call began, which the parent alone can wait for");
  }
  const Deadline deadline = timeout ? Deadline::after(*timeout) : Deadline::after(kNoLimit);
  const auto next_look = [&deadline] { return std::min<Nanoseconds>(kLook, deadline.remaining()); };
  std::exception_ptr interruption;
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, interruption ? kLook : next_look(), [this] { return done_; })) {
    if (deadline.passed() && !interruption) return false;
    lock.unlock();
    try {
      if (const auto at_home = home()) at_home->check();
    } catch (...) {
      fail_with(std::current_exception());
    }
    if (interrupt && !interruption) interruption = interrupted_by(interrupt);
    lock.lock();
  }
  if (interruption) std::rethrow_exception(interruption);
  if (error_) std::rethrow_exception(error_);
  return true;
}

// What the handler of a signal throws ends the group: peers cannot know how far this rank came. The
// call then ends soon, and until it has, the vectors are in use.
std::exception_ptr CompositeCall::interrupted_by(const Interrupt& interrupt) {
  try {
    interrupt();
  } catch (...) {
    const std::string text = concat("rank ", rank_, " was interrupted in ", describe());
    fail_with(std::make_exception_ptr(Error(ErrorKind::aborted, text)));
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace pycoll
