"""Bugs put into the core on purpose, each with the check of tests/native that must find it.

A mutant is one substitution: `find` stands exactly once in `file`. `check` is a scenario of the
stress driver under ThreadSanitizer, or the litmus program; `signs` are what its output may show, so
that a mutant is caught for what it breaks and not by chance.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    find: str
    replace: str
    breaks: str
    check: str
    signs: tuple[str, ...] = ("data race",)


FIFO = "csrc/transport/shm/fifo.h"
DOORBELL = "csrc/transport/shm/doorbell.h"
TRANSPORT = "csrc/transport/shm/shm_transport.cpp"
EXECUTOR = "csrc/runtime/executor.cpp"
WAKE = "    wake_if_sleeping(*place_.other_side_sleeping);\n"
FENCE = "  std::atomic_thread_fence(std::memory_order_seq_cst);\n"
WRONG_RESULT = (", expected ", "data of another operation")
NO_WAKE = ("a wake-up was lost", "nothing came within")

# Sorted by file: going from one file to the next compiles the first one again.
MUTANTS = [
    Mutant(
        "sleeper_fence",
        DOORBELL,
        "sleeping.store(1, std::memory_order_relaxed);\n" + FENCE,
        "sleeping.store(1, std::memory_order_relaxed);\n",
        "the sleeper's second look may run before its announcement is visible",
        "litmus",
        ("wake-up lost",),
    ),
    Mutant(
        "waker_fence",
        DOORBELL,
        FENCE + "  if (sleeping",
        "  if (sleeping",
        "the waker may look for sleepers before its flag is visible",
        "litmus",
        ("wake-up lost",),
    ),
    Mutant(
        "no_wake",
        DOORBELL,
        "    futex_wake_all(sleeping);\n",
        "",
        "a sleeper that is asleep already is not woken",
        "litmus",
        ("wake-up lost",),
    ),
    Mutant(
        "publish_relaxed",
        FIFO,
        "published.store(++published_, std::memory_order_release)",
        "published.store(++published_, std::memory_order_relaxed)",
        "the count may be visible before the message",
        "fifo",
    ),
    Mutant(
        "peek_relaxed",
        FIFO,
        "published.load(std::memory_order_acquire)",
        "published.load(std::memory_order_relaxed)",
        "the message may be read before its count",
        "fifo",
    ),
    Mutant(
        "release_relaxed",
        FIFO,
        "released.store(++released_, std::memory_order_release)",
        "released.store(++released_, std::memory_order_relaxed)",
        "a slot may be given back before it was read",
        "fifo",
    ),
    Mutant(
        "acquire_relaxed",
        FIFO,
        "released.load(std::memory_order_acquire)",
        "released.load(std::memory_order_relaxed)",
        "a slot may be written before it was given back",
        "fifo",
    ),
    Mutant(
        "slot_reused_early",
        FIFO,
        "if (published_ - released_seen_ >= place_.depth()) {",
        "if (published_ - released_seen_ > place_.depth()) {",
        "one message more than there are slots",
        "fifo",
        ("data race", "came where"),
    ),
    Mutant(
        "no_credit",
        FIFO,
        "    place_.control().released.store(++released_, std::memory_order_release);\n",
        "    ++released_;\n",
        "a slot that was read is never given back",
        "fifo",
        ("nothing came within",),
    ),
    Mutant(
        "publish_without_wake",
        FIFO,
        "published.store(++published_, std::memory_order_release);\n" + WAKE,
        "published.store(++published_, std::memory_order_release);\n",
        "a receiver that sleeps is not told of a message",
        "fifo",
        NO_WAKE,
    ),
    Mutant(
        "release_without_wake",
        FIFO,
        "released.store(++released_, std::memory_order_release);\n" + WAKE,
        "released.store(++released_, std::memory_order_release);\n",
        "a sender that sleeps is not told of a free slot",
        "fifo",
        NO_WAKE,
    ),
    Mutant(
        "arrive_relaxed",
        TRANSPORT,
        "store(arrival.word(), std::memory_order_release)",
        "store(arrival.word(), std::memory_order_relaxed)",
        "an arrival may be visible before what it vouches for",
        "window",
    ),
    Mutant(
        "arrival_of_relaxed",
        TRANSPORT,
        "flag(rank, lane, mine).load(std::memory_order_acquire)",
        "flag(rank, lane, mine).load(std::memory_order_relaxed)",
        "a window may be read before the arrival that vouches for it",
        "window",
    ),
    Mutant(
        "arrive_without_wake",
        TRANSPORT,
        "    if (peer != rank_ && reached) wake_if_sleeping(control(peer).sleeping);\n",
        "",
        "a rank that sleeps is not told of an arrival",
        "window",
        NO_WAKE,
    ),
    Mutant(
        "cell_not_alternated",
        TRANSPORT,
        "return control(rank).cells[parity].payload;",
        "return control(rank).cells[0].payload;",
        "the cell is written while peers still read what it showed last",
        "at_once/beside",
        ("data race", "element"),
    ),
    Mutant(
        "torn_call",
        TRANSPORT,
        "if (slot.sequence.load(std::memory_order_relaxed) != sequence) return std::nullopt;",
        "",
        "a call that is overwritten while it is read is taken for whole",
        "calls",
        ("half overwritten", "asked for call"),
    ),
    Mutant(
        "call_not_invalidated",
        TRANSPORT,
        "  slot.sequence.store(0, std::memory_order_relaxed);\n",
        "",
        "a call slot keeps its old number while it is overwritten",
        "calls",
        ("half overwritten", "asked for call"),
    ),
    Mutant(
        "last_member_missed",
        EXECUTOR,
        "lane.arrived < group.size();",
        "lane.arrived + 1 < group.size();",
        "a barrier does not wait for its last member",
        "all_reduce/one_shot",
        ("data race", *WRONG_RESULT),
    ),
    Mutant(
        "stale_arrival",
        EXECUTOR,
        "  ++lane.history->barriers;\n",
        "",
        "arrivals at the last barrier count for the next one",
        "all_gather/one_shot",
        ("data race", *WRONG_RESULT),
    ),
    Mutant(
        "window_not_alternated",
        EXECUTOR,
        "if (lane.uses_window) ++lane.history->window_rounds;",
        "",
        "a window buffer is written while peers still read the last round",
        "all_reduce/one_shot",
        ("data race", *WRONG_RESULT),
    ),
    Mutant(
        "drives_beside_one_inside",
        "csrc/runtime/driving.cpp",
        "if (!driven() && !limited) {",
        "if (!driving_ && !limited) {",
        "a second thread drives while a caller runs its operation at once",
        "at_once/beside",
        ("data race", *WRONG_RESULT, "Timed out", "mismatch"),
    ),
    Mutant(
        "message_fingerprint_unchecked",
        EXECUTOR,
        "if (message->tag.fingerprint != fingerprint_of(step)) report_mismatch(step.from);",
        "",
        "messages of different operations are combined",
        "mismatch/message",
        ("without an error",),
    ),
    Mutant(
        "barrier_fingerprint_unchecked",
        EXECUTOR,
        "if (theirs.same_barrier(mine) && !theirs.same_fingerprint(mine))",
        "if (false)",
        "ranks in different operations meet at a barrier",
        "mismatch/barrier",
        ("without an error",),
    ),
    Mutant(
        "tail_dropped",
        "csrc/runtime/slices.h",
        "(largest_chunk + slice - 1) / slice",
        "largest_chunk / slice",
        "the last slice of a vector is not reduced when it is not full",
        "all_gather/ring",
        WRONG_RESULT,
    ),
    Mutant(
        "no_recheck",
        "csrc/runtime/driving.cpp",
        "if (advance() || something_ended() ||",
        "if (something_ended() ||",
        "what came just before the announcement is slept over",
        "recheck",
        ("went to sleep though",),
    ),
    Mutant(
        "no_abort_recheck",
        "csrc/runtime/driving.cpp",
        "if (dead_.load(std::memory_order_acquire)) return transport_->cancel_sleep();",
        "",
        "an abort just before the announcement is slept over",
        "abort_recheck",
        ("went to sleep after it was aborted",),
    ),
    Mutant(
        "reason_overlooked",
        "csrc/runtime/failure.cpp",
        "fail(ErrorKind::aborted, *text);\n  return false;\n",
        ";\n  return false;\n",
        "a peer that aborted and left is blamed for leaving",
        "abort_and_leave",
        ("an error of another kind",),
    ),
    Mutant(
        "posted_message_slept_over",
        "csrc/runtime/driving.cpp",
        "drained || news_.load(std::memory_order_relaxed)) {",
        "drained) {",
        "a message posted just before its driver sleeps is slept over",
        "messages/recheck",
        ("went to sleep though a message was posted",),
    ),
    Mutant(
        "credit_unchecked",
        "csrc/runtime/messages.cpp",
        "if (cost_of(kind, bytes) > credit) return false;",
        "",
        "a sender runs ahead of its receiver without bound",
        "messages/bounded",
        ("exceeds its credit", "messages without a receive were sent"),
    ),
    Mutant(
        "quarantine_overlooked",
        "csrc/transport/shm/arena.cpp",
        "const bool held = is_quarantined(freed);",
        "const bool held = false;",
        "memory that a peer may still write is given to the next tensor",
        "arena",
        ("data race", "a quarantined block was given away", "another thread has this block"),
    ),
    Mutant(
        "not_opened_again",
        "csrc/transport/shm/port.cpp",
        "  line.sent = false;\n",
        "",
        "a group whose shared connection ended is not opened on the next one",
        "groups",
        ("waited in vain", "Timed out", "timed out", "waited"),
    ),
    Mutant(
        "sessions_ended_twice",
        "csrc/transport/tcp/link.cpp",
        "sessions.swap(sessions_);",
        "sessions = sessions_;",
        "a link that ends kills sessions that have moved to another",
        "tcp_asked_again",
        ("ended a session of another one",),
    ),
    Mutant(
        "offers_not_compared",
        "csrc/runtime/leased_call.cpp",
        "if (theirs->fingerprint != 0 && theirs->fingerprint != fingerprint_) {",
        "if (false) {",
        "peers' vectors are written before the calls have been compared",
        "mismatch/lease",
        ("of the output was written",),
    ),
    Mutant(
        "no_barrier_at_the_end",
        "csrc/program/zero_copy.cpp",
        "  program.lanes.front().steps.push_back({.kind = StepKind::barrier, .group = 0});\n",
        "",
        "a rank ends while its peers still use its vectors",
        "all_reduce/zero_copy",
        ("data race", *WRONG_RESULT),
    ),
    Mutant(
        "lender_does_not_wait",
        "csrc/transport/shm/shm_leases.cpp",
        "  wait_until_out();\n  std::vector",
        "  std::vector",
        "after a failure the caller has its vectors back while a peer works on them",
        "lease_revoked",
        ("data race", "a peer wrote"),
    ),
    Mutant(
        "exit_relaxed",
        "csrc/transport/shm/shm_leases.cpp",
        "borrowing.store(0, std::memory_order_release)",
        "borrowing.store(0, std::memory_order_relaxed)",
        "a borrower may be seen to be out before it is",
        "lease_revoked",
    ),
    Mutant(
        "done_relaxed",
        "csrc/runtime/operation.h",
        "done_.store(true, std::memory_order_release)",
        "done_.store(true, std::memory_order_relaxed)",
        "whoever polls may see an operation done before its result",
        "async",
    ),
]
