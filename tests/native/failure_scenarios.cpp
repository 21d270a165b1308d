// Scenarios in which operations must fail, on every rank, in the way that was promised.
#include <algorithm>
#include <atomic>
#include <thread>

#include "cases.h"
#include "scenario.h"
#include "transport/shm/arena.h"

namespace pycoll::stress {
namespace {

// Runs collectives until one throws, and returns that error.
Error run_until_error(Rank& self) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(15));
  while (!deadline.passed()) {
    const Algorithm& algorithm = algorithms()[self.agreed.below(algorithms().size())];
    const Case drawn = draw_case(algorithm, self.world_size, self.agreed);
    Vectors vectors(drawn, self.rank, self.world_size);
    try {
      self.communicator.run(vectors.request(), nullptr);
    } catch (const Error& error) {
      return error;
    }
    vectors.check_result();
    self.delays.maybe();
  }
  throw CheckFailed("no error within 15 s");
}

void check_error(const Error& error, std::initializer_list<ErrorKind> kinds,
                 const std::string& part) {
  bool expected = false;
  for (const ErrorKind kind : kinds) expected |= error.kind() == kind;
  check(expected, "an error of another kind than expected: ", error.what());
  check(std::string(error.what()).find(part) != std::string::npos, "'", part,
        "' is not in the error: ", error.what());
}

void check_stays_dead(Rank& self, const Error& first) {
  try {
    Vectors vectors({find_algorithm(Collective::barrier, "one_shot")}, self.rank, self.world_size);
    self.communicator.run(vectors.request(), nullptr);
  } catch (const Error& again) {
    check(again.kind() == first.kind() && std::string(again.what()) == first.what(),
          "a dead group raised another error: ", again.what(), " after: ", first.what());
    return;
  }
  throw CheckFailed("a dead group ran an operation");
}

void abort_body(Rank& self, int who) {
  std::thread aborter;
  if (self.rank == who) {
    const auto delay = std::chrono::microseconds(self.rng.below(4000));
    aborter = std::thread([&self, delay] {
      std::this_thread::sleep_for(delay);
      self.communicator.abort("enough");
    });
  }
  std::string complaint;
  try {
    const Error error = run_until_error(self);
    check_error(error, {ErrorKind::aborted}, concat("rank ", who, " aborted the group"));
    check_stays_dead(self, error);
  } catch (const CheckFailed& failed) {
    complaint = failed.what();
  }
  if (aborter.joinable()) aborter.join();
  check(complaint.empty(), complaint);
}

void abort(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    const int who = static_cast<int>(mix(options.seed) % options.world_size);
    run_world(options, [who](Rank& self) { abort_body(self, who); });
  });
}

// An abort that comes between the last look and prepare_sleep() must be seen, not slept over.
void abort_recheck(const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    std::atomic<Communicator*> sleeper{nullptr};
    std::atomic<bool> aborted{false};
    std::atomic<int> sleeps{0};
    WorldOptions options;
    options.seed = seed++;
    options.delays = false;
    options.config.spin_us = 0;
    options.hooks[1].before_prepare_sleep = [&] {
      if (sleeper != nullptr && !aborted.exchange(true)) sleeper.load()->abort("enough");
    };
    options.hooks[1].before_sleep = [&] { sleeps += aborted ? 1 : 0; };
    run_world(options, [&](Rank& self) {
      if (self.rank == 1) sleeper = &self.communicator;
      // Rank 0 stays away until rank 1 has given up.
      const Deadline deadline = Deadline::after(std::chrono::seconds(10));
      while (self.rank == 0 && !aborted && !deadline.passed()) std::this_thread::yield();
      check_error(run_until_error(self), {ErrorKind::aborted}, "rank 1 aborted the group");
    });
    check(sleeps == 0, "rank 1 went to sleep after it was aborted");
  } while (!settings.until.passed());
}

// A peer aborts and leaves between the look for aborts and the look for peers that left: what it
// said counts, not that it went.
void abort_and_leave(const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    std::atomic<bool> looked{false};
    WorldOptions options;
    options.seed = seed++;
    options.delays = false;
    options.config.spin_us = 0;
    bool connected = false;  // rank 1, whose thread this is
    bool waits = false;      // inside an operation
    options.hooks[1].before_prepare_sleep = [&] { waits = connected; };
    options.hooks[1].after_peer_abort = [&](Transport& inner) {
      if (!waits || looked.exchange(true)) return;
      const Deadline deadline = Deadline::after(std::chrono::seconds(10));
      while (inner.peer_state(0) == PeerState::alive && !deadline.passed()) {
        std::this_thread::yield();
      }
    };
    run_world(options, [&](Rank& self) {
      if (self.rank == 1) {
        connected = true;
        const Error error = run_until_error(self);
        return check_error(error, {ErrorKind::aborted}, "rank 0 aborted the group: enough");
      }
      const Deadline deadline = Deadline::after(std::chrono::seconds(10));
      while (!looked && !deadline.passed()) std::this_thread::yield();
      self.communicator.abort("enough");
    });
  } while (!settings.until.passed());
}

void leave(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    const int who = static_cast<int>(mix(options.seed) % options.world_size);
    run_world(options, [who](Rank& self) {
      for (uint64_t i = self.agreed.below(30); i > 0; --i) {
        const Algorithm& barrier = *find_algorithm(Collective::barrier, "one_shot");
        Vectors vectors(draw_case(barrier, self.world_size, self.agreed), self.rank,
                        self.world_size);
        self.communicator.run(vectors.request(), nullptr);
      }
      if (self.rank == who) return;
      // Whoever notices first aborts the group; the others then hear of it from that rank.
      const Error error = run_until_error(self);
      check_error(error, {ErrorKind::peer_failed, ErrorKind::aborted},
                  concat("rank ", who, " left the group"));
      check_stays_dead(self, error);
    });
  });
}

Error run_ring(Rank& self) {
  const Case ring{find_algorithm(Collective::all_reduce, "ring"),
                  DType::int32,
                  ReduceOp::sum,
                  100,
                  0,
                  false,
                  1};
  Vectors vectors(ring, self.rank, self.world_size);
  try {
    self.communicator.run(vectors.request(), nullptr);
  } catch (const Error& error) {
    return error;
  }
  throw CheckFailed("an all_reduce ended although rank 0 came late for it");
}

void timeout(const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    WorldOptions options;
    options.seed = seed++;
    options.timeout = std::chrono::milliseconds(80);
    run_world(options, [](Rank& self) {
      if (self.rank == 1) {
        return check_error(run_ring(self), {ErrorKind::timed_out}, "waiting for rank 0");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      // The first messages of rank 1 are there, the rest never comes.
      check_error(run_ring(self), {ErrorKind::aborted}, "Timed out");
    });
  } while (!settings.until.passed());
}

// Rank 0 sums, the others want the maximum. The same messages travel, so only the fingerprint tells
// them apart. They spin for long, so that the comparison of announced calls before sleeping is not
// what finds it.
void mismatch_in(const std::string& algorithm, uint64_t seed) {
  WorldOptions options;
  options.seed = seed;
  options.delays = false;
  options.config.spin_us = 1'000'000;
  std::atomic<int> found{0};
  run_world(options, [&](Rank& self) {
    const ReduceOp op = self.rank == 0 ? ReduceOp::sum : ReduceOp::max;
    const Case one{
        find_algorithm(Collective::all_reduce, algorithm), DType::int32, op, 40, 0, false, seed};
    Vectors vectors(one, self.rank, self.world_size);
    CallRequest request = vectors.request();
    const std::byte* output = request.output.blocks[0].data;
    try {
      self.communicator.run(std::move(request), nullptr);
    } catch (const Error& error) {
      check_error(error, {ErrorKind::mismatch, ErrorKind::aborted}, "reduce operations differ");
      found += error.kind() == ErrorKind::mismatch ? 1 : 0;
      for (int i = 0; i < 160; ++i) {
        check(output[i] == std::byte{0xA5}, "byte ", i, " of the output was written");
      }
      return;
    }
    throw CheckFailed("sum and max ran together without an error");
  });
  check(found > 0, "nobody found the mismatch");
}

void mismatch(const std::string& algorithm, const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    mismatch_in(algorithm, seed++);
  } while (!settings.until.passed());
}

// Of a run of `lease_revoked`: who aborts does so while a peer is in others' vectors, and that peer
// stays there until somebody has its memory back. What a lender does too early is so always seen.
struct Revocation {
  int who = 0;
  std::atomic<bool> peer_inside{false};
  std::atomic<bool> revoked{false};
  std::atomic<bool> reused{false};  // some rank has written to its memory after the error

  // What a borrower is told is true no more when this returns. Relaxed: these order nothing, so
  // that a data race stays one.
  void linger(int rank) {
    if (rank != who) peer_inside.store(true, std::memory_order_relaxed);
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    if (!revoked.load(std::memory_order_relaxed)) return;
    // Less than the patience of a lender, which goes on without a borrower that does not run.
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(30));
    while (!reused.load(std::memory_order_relaxed) && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  }

  void abort_amid(Rank& self) {
    const Deadline deadline = Deadline::after(std::chrono::seconds(10));
    while (!peer_inside.load(std::memory_order_relaxed) && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(self.rng.below(3000)));
    revoked.store(true, std::memory_order_relaxed);
    self.communicator.abort("enough");
  }
};

// Zero-copy calls, nearly all the time in peers' vectors, until one rank aborts from another
// thread; then every rank reuses its memory at once. A peer that still works on it is a data race.
void revoked_body(Rank& self, Revocation& revocation) {
  constexpr uint64_t kCount = 300'000;  // several portions a rank
  const int who = revocation.who;
  const auto arena = shm::process_arena();
  check(arena != nullptr, "no arena: ", shm::process_arena_problem());
  const std::shared_ptr<void> memory(arena->allocate(kCount * 4), [&](void* p) { arena->free(p); });
  auto* const data = static_cast<std::byte*>(memory.get());
  check(data != nullptr, "the arena has no room");
  std::fill(data, data + kCount * 4, std::byte{5});

  std::thread aborter;
  if (self.rank == who) aborter = std::thread([&] { revocation.abort_amid(self); });
  std::string complaint = "no error within 15 s";
  const Deadline deadline = Deadline::after(std::chrono::seconds(15));
  while (!deadline.passed()) {
    CallRequest request;
    request.collective = Collective::all_reduce;
    request.algorithm = "zero_copy";
    request.dtype = DType::int32;
    request.reduce_op = ReduceOp::max;  // of equal values: the data stay as they are
    request.input.blocks = request.output.blocks = {{data, kCount}};
    try {
      self.communicator.run(std::move(request), nullptr);
    } catch (const Error& error) {
      std::fill(data, data + kCount * 4, std::byte{0x77});
      revocation.reused.store(true, std::memory_order_relaxed);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const bool kept =
          std::all_of(data, data + kCount * 4, [](std::byte b) { return b == std::byte{0x77}; });
      complaint = kept ? "" : "a peer wrote to this rank's memory after the error";
      if (kept)
        check_error(error, {ErrorKind::aborted}, concat("rank ", who, " aborted the group"));
      break;
    }
  }
  if (aborter.joinable()) aborter.join();
  check(complaint.empty(), complaint);
}

void lease_revoked(const Settings& settings) {
  run_episodes(settings, [](WorldOptions options) {
    Revocation revocation;
    revocation.who = static_cast<int>(mix(options.seed) % options.world_size);
    for (int rank = 0; rank < options.world_size; ++rank) {
      options.hooks[rank].while_borrowing = [&revocation, rank] { revocation.linger(rank); };
    }
    run_world(options, [&revocation](Rank& self) { revoked_body(self, revocation); });
  });
}

// What a refused call kept alive may need a lock to go (Python's), and whoever has that lock may
// ask the group something meanwhile.
void refused(const Settings& settings) {
  WorldOptions options;
  options.seed = settings.seed;
  options.delays = false;
  run_world(options, [](Rank& self) {
    std::atomic<bool> answered{false};
    bool in_time = false;
    std::thread other;
    CallRequest request;
    request.root = self.world_size;  // no rank
    request.keep_alive = std::shared_ptr<void>(nullptr, [&](void*) {
      other = std::thread([&] {
        self.communicator.sequence();
        answered = true;
      });
      const Deadline deadline = Deadline::after(std::chrono::seconds(2));
      while (!answered && !deadline.passed()) std::this_thread::yield();
      in_time = answered;
    });
    std::string text;
    try {
      self.communicator.submit(std::move(request));
    } catch (const Error& error) {
      text = error.what();
    }
    other.join();
    check(text.find("is not a rank") != std::string::npos, "not refused: ", text);
    check(in_time, "a refused call is dropped under the group's lock");
  });
}

}  // namespace

std::vector<Scenario> failure_scenarios() {
  return {
      {"abort", "one rank aborts from another thread amid operations", abort},
      {"abort_recheck", "an abort that comes just before its rank sleeps", abort_recheck},
      {"abort_and_leave", "a peer aborts and is gone before anyone looks", abort_and_leave},
      {"refused", "a refused call lets go of what it kept alive", refused},
      {"leave", "one rank leaves in good order, the others go on", leave},
      {"timeout", "a rank that does not come is named", timeout},
      {"mismatch/message", "operations that differ, found in messages",
       [](const Settings& s) { mismatch("recursive_doubling", s); }},
      {"mismatch/barrier", "operations that differ, found at a barrier",
       [](const Settings& s) { mismatch("one_shot", s); }},
      {"mismatch/lease", "operations that differ, found before any vector is touched",
       [](const Settings& s) { mismatch("zero_copy", s); }},
      {"lease_revoked", "a rank aborts amid zero-copy calls, and its memory is used again at once",
       lease_revoked},
  };
}

}  // namespace pycoll::stress
