// What an executor makes of data that belong to another operation than its own: whose calls differ.
#include <algorithm>

#include "core/error.h"
#include "runtime/executor.h"
#include "runtime/slices.h"

namespace pycoll {
namespace {

// For a peer to answer what it called; it may be in Python, but its transport is asked, not itself.
constexpr Nanoseconds kAnswerTime = std::chrono::seconds(1);

}  // namespace

void Executor::report_mismatch(int peer) const {
  compare_calls(peer);
  const auto theirs = transport_.call_of(peer, in_.call.sequence);
  if (theirs && traits_of(in_.call.collective).lengths == Lengths::pairwise) {
    fail(
        ErrorKind::mismatch, "rank ", rank_, ", ", to_string(in_.call), ": rank ", peer,
        " sends a block of another length than the ",
        in_.output.blocks[static_cast<size_t>(peer)].count,
        " elements that this rank expects of it. What a rank sends and what its peer receives must "
        "have one length");
  }
  const auto latest = transport_.latest_call_of(peer);
  fail(ErrorKind::mismatch, "rank ", rank_, " is in ", to_string(in_.call),
       " but received data of another operation from rank ", peer,
       latest ? ", which is in " + to_string(*latest) : std::string(),
       ". Every rank must call the same collectives in the same order");
}

uint32_t Executor::fingerprint_of(const Step& step) const {
  if (traits_of(in_.call.collective).lengths != Lengths::pairwise) return fingerprint_;
  const ChunkCutter cut(*in_.program, in_.input, in_.output, element_);
  const uint64_t length = cut.range_of(step).size() * 0x9E3779B97F4A7C15u;
  return fingerprint_ ^ static_cast<uint32_t>(length >> 32);
}

// The oldest that differs: who needs nothing of the others in a call, as a root does, has gone on.
void Executor::compare_calls(int peer) const {
  const uint64_t now = in_.call.sequence;
  const uint64_t oldest = now < past_.size() ? 1 : now - past_.size() + 1;  // they count from 1
  for (uint64_t sequence = oldest; sequence <= now; ++sequence) {
    const CallHeader& mine = past_[sequence % past_.size()];
    const auto theirs = transport_.call_of(peer, sequence);
    if (mine.sequence != sequence || !theirs || fingerprint(*theirs) == fingerprint(mine)) continue;
    fail(ErrorKind::mismatch, describe_mismatch(rank_, mine, peer, *theirs));
  }
}

// Throws when it is, as soon as it is known whose calls differ. A peer that has gone on without
// this call is asked what it called in its place; whoever drives compares its answer.
bool Executor::is_of_another(const Message& message, const Step& step) {
  if (message.tag.fingerprint == fingerprint_of(step)) return false;
  const bool known = transport_.call_of(step.from, in_.call.sequence).has_value();
  if (known || (asked_ && asked_->passed())) report_mismatch(step.from);
  compare_calls(step.from);
  if (!asked_) {
    transport_.inquire();
    asked_ = Deadline::after(kAnswerTime);
  }
  return true;
}

}  // namespace pycoll
