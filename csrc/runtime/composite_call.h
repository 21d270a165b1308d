// One call that is carried out by several operations of groups which serve nothing else.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/fork_mark.h"
#include "runtime/communicator.h"
#include "runtime/pending.h"

namespace pycoll {

// Whose calls these are. Lives as long as one of them is under way. Whoever waited for a call may
// drop the home then: a call that has ended does not hold it, as its own last reference goes in a
// thread of one of those groups, which cannot end them.
class CallHome {
 public:
  virtual ~CallHome() = default;
  // Asked by who waits: throws when the group has ended.
  virtual void check() = 0;
  // The first error of a call.
  virtual void give_up(const std::exception_ptr& error) = 0;
  // In a forked child nobody ends what the parent has begun.
  virtual std::shared_ptr<const ForkMark> fork_mark() const = 0;
  // A call has ended; before its callers are told.
  virtual void ended() = 0;
};

class CompositeCall : public Pending, public std::enable_shared_from_this<CompositeCall> {
 public:
  CompositeCall(const CompositeCall&) = delete;
  CompositeCall& operator=(const CompositeCall&) = delete;

  // Begins the operations. Nothing is thrown: errors are the call's. It does not end before
  // started(), which may end it in this thread, and others with it, callbacks included: so that is
  // for a thread without locks.
  void start();
  void started() { leave(); }

  bool wait(std::optional<Nanoseconds> timeout, const Interrupt& interrupt) override;
  bool done() const override;
  std::exception_ptr error() const override;

 protected:
  CompositeCall(RequestBase base, int rank, std::shared_ptr<CallHome> home)
      : base_(std::move(base)),
        rank_(rank),
        fork_mark_(home->fork_mark()),
        home_(std::move(home)) {}

  virtual void begin() = 0;
  // The last part is over, and nobody has been told: gives up what is the home's, groups too.
  virtual void settle() = 0;
  // An operation, and what to do with its result, before that of any later one on the lane. What
  // `then` throws fails the call. The group's time counts for each operation, from the moment it is
  // driven.
  // `after` runs when the operation has ended, in whatever way, in a thread that drives nothing.
  void submit(Communicator& lane, CallRequest request, std::function<void()> then,
              std::function<void()> after = nullptr);
  // What makes an operation, or another composite call, a part of this one; `throw_why` throws the
  // reason when it has failed.
  struct Steps {
    std::function<void()> then{};
    std::function<void()> after{};
    std::function<void()> throw_why{};
  };
  void adopt(RequestBase& part, Steps steps);
  // One more operation; false when there shall be none, after an error. Each is to leave(), in a
  // thread that drives nothing.
  bool enter();
  void leave();
  // One that was not begun after all, in a thread that may drive: the call goes on.
  void withdraw();
  // Remembers the first error. The home is told when something leaves: in this thread others' calls
  // must not end, nor their callbacks be called.
  void note(std::exception_ptr error);

 private:
  // None when the call has ended, or is about to.
  std::shared_ptr<CallHome> home() const;
  // note(), and the home is told. By who waits.
  void fail_with(const std::exception_ptr& error);
  void tell_home();
  std::exception_ptr interrupted_by(const Interrupt& interrupt);

  RequestBase base_;
  const int rank_;
  // Asked before mutex_, which a thread of the parent's may hold in a child.
  const std::shared_ptr<const ForkMark> fork_mark_;

  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::shared_ptr<CallHome> home_;  // until the call ends; guarded by mutex_
  uint64_t open_ = 1;               // operations under way, and start(); guarded by mutex_
  std::exception_ptr error_;        // the first; guarded by mutex_
  bool told_ = false;               // the home, of the error; guarded by mutex_
  bool done_ = false;               // guarded by mutex_
};

}  // namespace pycoll
