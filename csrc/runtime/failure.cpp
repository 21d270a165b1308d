// The communicator when things go wrong: finding out why nothing moves, dying, telling the peers;
// and the end of a group.
#include <unistd.h>

#include "core/error.h"
#include "runtime/communicator.h"

namespace pycoll {
namespace {

// How long close() waits for operations that are still queued.
constexpr auto kCloseGrace = std::chrono::seconds(5);

}  // namespace

Nanoseconds Communicator::until_deadline(const Operation& operation) const {
  return operation.timeout_ - (Clock::now() - started_);
}

void Communicator::throw_if_dead() const {
  if (!dead()) return;
  const Lock lock(mutex_);
  std::rethrow_exception(death_);
}

void Communicator::look_for_trouble(const Operation& operation) {
  throw_if_dead();
  if (const auto text = transport_->peer_abort()) fail(ErrorKind::aborted, *text);

  const CallHeader& mine = operation.call();
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const auto theirs = transport_->call_of(peer, mine.sequence);
    if (theirs && fingerprint(*theirs) != fingerprint(mine)) {
      fail(ErrorKind::mismatch, describe_mismatch(rank_, mine, peer, *theirs));
    }
  }

  for (const int peer : executor_.waiting_for()) {
    const PeerState state = transport_->peer_state(peer);
    if (state == PeerState::alive) continue;
    // What it published before it went counts: only if that does not help is it missed.
    if (executor_.advance()) return;
    // A peer that gave the group up says why before it goes: both may have come since the look
    // above, and the reason names whoever is to blame.
    if (const auto text = transport_->peer_abort()) fail(ErrorKind::aborted, *text);
    fail(ErrorKind::peer_failed, "rank ", peer,
         state == PeerState::died ? " died (its process is gone)" : " left the group",
         " while rank ", rank_, " waited for it in ", to_string(mine), " of ", world_size_,
         " ranks. Look at that rank's own output for the reason");
  }
  if (until_deadline(operation) <= Nanoseconds(0)) report_timeout(operation);
}

void Communicator::report_timeout(const Operation& operation) const {
  const CallHeader& mine = operation.call();
  std::string who;
  for (const int peer : executor_.waiting_for()) {
    const auto latest = const_cast<Transport&>(*transport_).latest_call_of(peer);
    who += concat(who.empty() ? "" : "; ", "rank ", peer);
    if (!latest) {
      who += ", which has made no call on this group";
    } else if (latest->sequence < mine.sequence) {
      who += concat(", which has not come beyond ", to_string(*latest));
    } else {
      who += ", which is in the same operation and waits itself, or is slow";
    }
  }
  fail(ErrorKind::timed_out, "rank ", rank_, ": Timed out after ",
       to_seconds(Clock::now() - started_), " s in ", to_string(mine), " of ", world_size_,
       " ranks, waiting for ", who, ". Raise the timeout if that rank is only slow");
}

void Communicator::die(const std::string& reason, std::exception_ptr error, bool tell_peers) {
  std::deque<std::shared_ptr<Operation>> orphans;
  {
    const Lock lock(mutex_);
    if (!dead_.load(std::memory_order_relaxed)) {
      death_ = error;
      dead_.store(true, std::memory_order_release);
      if (tell_peers) transport_->send_abort(reason);
    }
    // The operation that a thread still drives is left in the queue: that thread ends it.
    while (queue_.size() > (driving_ ? 1u : 0u)) {
      orphans.push_front(std::move(queue_.back()));
      queue_.pop_back();
      orphans.front()->finish(death_);
    }
    change_.notify_all();
  }
  transport_->wake();
  for (const auto& orphan : orphans) {
    orphan->call_on_complete();
    orphan->release();
  }
}

void Communicator::abort(const std::string& reason) {
  if (::getpid() != owner_pid_) return;
  const std::string text = concat("rank ", rank_, " aborted the group: ", reason);
  die(text, std::make_exception_ptr(Error(ErrorKind::aborted, text)), true);
}

void Communicator::close() {
  if (::getpid() != owner_pid_) return;
  const Deadline grace = Deadline::after(kCloseGrace);
  {
    Lock lock(mutex_);
    while (!queue_.empty() && !dead() && !grace.passed()) {
      ++waiters_;
      change_.wait_for(lock, std::chrono::milliseconds(20));
      --waiters_;
    }
  }
  if (!dead()) {
    const std::string reason = concat("rank ", rank_, " closed the group");
    const bool unfinished = [this] {
      const Lock lock(mutex_);
      return !queue_.empty();
    }();
    die(reason, std::make_exception_ptr(Error(ErrorKind::aborted, reason)), unfinished);
  }
  stop_progress();
  transport_->leave();
}

}  // namespace pycoll
