// The communicator when things go wrong: finding out why nothing moves, dying, telling the peers;
// and the end of a group.
#include <algorithm>

#include "core/error.h"
#include "runtime/communicator.h"

namespace pycoll {
namespace {

// How long close() waits for operations that are still queued.
constexpr auto kCloseGrace = std::chrono::seconds(5);

std::string how_it_died(Transport& transport, int peer) {
  const std::string reason = transport.death_reason(peer);
  return concat(" died (", reason.empty() ? "its process is gone" : reason, ")");
}

}  // namespace

Nanoseconds Communicator::until_deadline(const Operation& operation) {
  return operation.timeout_ - (Clock::now() - operation.started_);
}

Nanoseconds Communicator::until_first_deadline() const {
  Nanoseconds first = kNoLimit;
  if (current_) first = until_deadline(*current_);
  for (const auto& message : messages_.pending()) first = std::min(first, until_deadline(*message));
  return std::max(first, Nanoseconds(0));
}

void Communicator::throw_if_dead() const {
  // Without the lock, which a caller that holds the GIL must not wait for: death_ is written once,
  // before dead_ is set.
  if (dead()) std::rethrow_exception(death_);
}

void Communicator::look_for_trouble() {
  throw_if_dead();
  // Whoever gave the group up may have ended this operation before: then it succeeds here too.
  if (transport_->peer_abort() && help_from_the_gone()) return;
  if (current_) look_at_collective();
  for (const auto& message : messages_.pending()) {
    if (look_at_message(*message)) return;
  }
}

void Communicator::look_between_portions() {
  throw_if_dead();
  if (const auto text = transport_->peer_abort()) fail(ErrorKind::aborted, *text);
}

// A peer has gone that is waited for. What it published before counts: true when that helped. One
// that gave the group up says why before it goes: both may have come since the last look, and the
// reason names whoever is to blame.
bool Communicator::help_from_the_gone() {
  if (advance()) return true;
  if (const auto text = transport_->peer_abort()) fail(ErrorKind::aborted, *text);
  return false;
}

void Communicator::look_at_collective() {
  const CallHeader& mine = current_->call();
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
    if (help_from_the_gone()) return;
    fail(ErrorKind::peer_failed, "rank ", peer,
         state == PeerState::died ? how_it_died(*transport_, peer) : " left the group",
         " while rank ", rank_, " waited for it in ", to_string(mine), " of ", world_size_,
         " ranks. Look at that rank's own output for the reason");
  }
  if (until_deadline(*current_) <= Nanoseconds(0)) report_timeout(*current_);
}

void Communicator::compare_elsewhere(const CallHeader& call) const {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const auto theirs = transport_->call_of(peer, call.sequence);
    // Those that are carried out elsewhere are compared there.
    if (theirs && theirs->codec == 0) {
      fail(ErrorKind::mismatch, describe_mismatch(rank_, call, peer, *theirs));
    }
  }
}

// True when something moved: the list of messages may be another then.
bool Communicator::look_at_message(const MessageOperation& operation) {
  // A receive from any source is lost when somebody died, or when everybody has left.
  const std::vector<int> peers = messages_.waiting_for(operation);
  int gone = -1;
  size_t left = 0;
  for (const int peer : peers) {
    const PeerState state = transport_->peer_state(peer);
    left += state == PeerState::left ? 1 : 0;
    if (state == PeerState::died || left == peers.size()) gone = peer;
  }
  if (gone >= 0) {
    if (help_from_the_gone()) return true;
    fail(ErrorKind::peer_failed, "rank ", gone,
         left == peers.size() ? " left the group" : how_it_died(*transport_, gone), " while rank ",
         rank_, " waited for it in ", operation.describe(),
         ". Look at that rank's own output for the reason");
  }
  if (until_deadline(operation) > Nanoseconds(0)) return false;
  fail(ErrorKind::timed_out, waited_in(operation), ": ", messages_.why_waiting(operation),
       ". Raise the timeout if that rank is only slow");
}

std::string Communicator::waited_in(const Operation& operation) const {
  return concat("rank ", rank_, ": Timed out after ", to_seconds(Clock::now() - operation.started_),
                " s in ", operation.describe(), " of ", world_size_, " ranks");
}

// "rank 1, which has not come beyond barrier #2; rank 2 has made no call on this group that is
// known here": over TCP a rank that stands still cannot answer where it is, and may have sent only
// others a message so far.
std::string Communicator::whom_it_waits_for(const CollectiveOperation& operation) const {
  const CallHeader& mine = operation.call();
  const std::vector<int> waited_for = executor_.waiting_for();
  std::string who, others;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const auto latest = transport_->latest_call_of(peer);
    const bool behind = !latest || latest->sequence < mine.sequence;
    const std::string where = latest ? concat("has not come beyond ", to_string(*latest))
                                     : "has made no call on this group that is known here";
    if (std::find(waited_for.begin(), waited_for.end(), peer) != waited_for.end()) {
      who += concat(who.empty() ? "" : "; ", "rank ", peer, ", which ",
                    behind ? where : "is in the same operation and waits itself, or is slow");
    } else if (behind) {
      // Whom this rank waits for may itself wait for that one.
      others += concat("; rank ", peer, " ", where);
    }
  }
  return who + others;
}

void Communicator::report_timeout(const CollectiveOperation& operation) const {
  // Such a rank waits in a group that this one does not see from here.
  const char* const or_else =
      operation.call().codec == 0
          ? ""
          : "; every rank must give the call a codec, or be in the same region";
  fail(ErrorKind::timed_out, waited_in(operation), ", waiting for ", whom_it_waits_for(operation),
       ". Raise the timeout if that rank is only slow", or_else);
}

// Ends all operations but those that a thread drives: it ends them itself. Their callbacks are the
// caller's to call; whoever drives must not call them before it has ended the others, which they
// may wait for.
Communicator::Operations Communicator::end_group(const Death& death) {
  Operations orphans;
  bool news = false;
  {
    const Lock lock(mutex_);
    if (!dead_.load(std::memory_order_relaxed)) {
      news = !death.in_order;
      death_ = death.error;
      dead_.store(true, std::memory_order_release);
      if (death.tell_peers) transport_->send_abort(death.reason);
      if (flight_ && news) flight_->died(death.reason);
      if (notice_) orphans.push_back(std::exchange(notice_, nullptr));
    }
    // Whoever is inside ends its own operation; from here on nobody enters.
    turn_.become_busy();
    const bool keep_first = driving_ && current_ != nullptr;
    while (queue_.size() > (keep_first ? 1u : 0u)) {
      orphans.push_back(std::move(queue_.back()));
      queue_.pop_back();
    }
    open_messages_ -= posted_.size();
    orphans.insert(orphans.end(), posted_.begin(), posted_.end());
    posted_.clear();
    if (!driven()) {
      executor_.give_up();
      current_.reset();
      const auto messages = messages_.give_up();
      open_messages_ -= messages.size();
      orphans.insert(orphans.end(), messages.begin(), messages.end());
    }
    for (const auto& orphan : orphans) orphan->finish(death_);
    change_.notify_all();
  }
  transport_->wake();
  if (news) dump_flight();
  return orphans;
}

// Nothing that goes wrong with it may hide why the group ends.
void Communicator::dump_flight() const {
  if (recorder_ == nullptr || config_.dump_dir.empty()) return;
  try {
    recorder_->dump(config_.dump_dir);
  } catch (const std::exception&) {
    // A full disk, say. The records are still there for `pycoll status`.
  }
}

// By a thread that does not drive.
void Communicator::die(const Death& death) {
  for (const auto& orphan : end_group(death)) {
    orphan->call_on_complete();
    orphan->release();
  }
}

// Of one whose group has died: an operation that nobody asked for, since those are told in the
// right place, whoever ends the group.
class DeathNotice final : public Operation {
 public:
  explicit DeathNotice(std::function<void()> tell)
      : Operation({{}, {}, {}, std::move(tell)}, Nanoseconds(0)) {}
  std::string describe() const override { return "the end of the group"; }
};

void Communicator::when_dead(std::function<void()> tell) {
  {
    const Lock lock(mutex_);
    if (!dead_.load(std::memory_order_relaxed)) {
      notice_ = std::make_shared<DeathNotice>(std::move(tell));
      return;
    }
  }
  tell();
}

void Communicator::abort(const std::string& reason) {
  if (fork_mark_.in_child()) return;
  const std::string text = concat("rank ", rank_, " aborted the group: ", reason);
  die({text, std::make_exception_ptr(Error(ErrorKind::aborted, text))});
}

void Communicator::close() {
  if (fork_mark_.in_child()) return;
  const Deadline grace = Deadline::after(kCloseGrace);
  {
    Lock lock(mutex_);
    while ((unfinished() || turn_.inside()) && !dead() && !grace.passed() && !in_own_interrupt()) {
      ++waiters_;
      change_.wait_for(lock, std::chrono::milliseconds(20));
      --waiters_;
    }
  }
  if (!dead()) {
    const std::string reason = concat("rank ", rank_, " closed the group");
    const bool tell_peers = [this] {
      const Lock lock(mutex_);
      return unfinished() || turn_.inside();
    }();
    die({reason, std::make_exception_ptr(Error(ErrorKind::aborted, reason)), tell_peers, true});
  }
  stop_progress();
  transport_->leave();
}

}  // namespace pycoll
