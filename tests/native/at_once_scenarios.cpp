// Synchronous calls that run at once, beside everything that may come in between: messages of
// another thread, asynchronous calls, an abort.
#include <atomic>
#include <functional>
#include <thread>

#include "scenario.h"

namespace pycoll::stress {
namespace {

float value_of(int rank, uint64_t turn, uint64_t i) {
  return static_cast<float>((static_cast<uint64_t>(rank) * 31 + turn * 7 + i) % 1000);
}

// A vector of each rank, summed. Lengths in and beyond the cell.
class Sum {
 public:
  Sum(Rank& self, uint64_t turn) : world_size_(self.world_size), turn_(turn) {
    const uint64_t lengths[] = {0, 1, 13, 14, 200, 4000};
    values_.resize(lengths[self.agreed.below(std::size(lengths))]);
    for (uint64_t i = 0; i < values_.size(); ++i) values_[i] = value_of(self.rank, turn, i);
  }

  PlainCall call() {
    const PlainCall::Vector vector{reinterpret_cast<std::byte*>(values_.data()), values_.size(), 1};
    PlainCall call;
    call.collective = Collective::all_reduce;
    call.dtype = DType::float32;
    call.reduce_op = ReduceOp::sum;
    call.input = call.output = vector;
    return call;
  }
  CallRequest request() {
    CallRequest request;
    request.collective = Collective::all_reduce;
    request.dtype = DType::float32;
    request.reduce_op = ReduceOp::sum;
    request.input.blocks.push_back({reinterpret_cast<std::byte*>(values_.data()), values_.size()});
    request.output = request.input;
    return request;
  }
  void verify() const {
    for (uint64_t i = 0; i < values_.size(); ++i) {
      float expected = 0;
      for (int rank = 0; rank < world_size_; ++rank) expected += value_of(rank, turn_, i);
      check(values_[i] == expected, "turn ", turn_, ": element ", i, " is ", values_[i], ", not ",
            expected);
    }
  }

 private:
  int world_size_;
  uint64_t turn_;
  std::vector<float> values_;
};

void one_turn(Rank& self, uint64_t turn) {
  Sum sum(self, turn);
  self.communicator.run(sum.call(), nullptr);
  sum.verify();
  self.delays.maybe();
  if (turn % 8 != 0) return;
  // One that is queued while nothing is under way, and one at once behind it.
  Sum queued(self, turn + 1000);
  Sum next(self, turn + 2000);
  const auto operation = self.communicator.submit(queued.request());
  self.communicator.run(next.call(), nullptr);
  next.verify();
  check(self.communicator.wait(operation, std::nullopt, nullptr), "wait() without a limit ended");
  queued.verify();
}

// What another thread of this rank does meanwhile: a byte round the ring, over and over.
void pass_bytes(Rank& self, Communicator& communicator) {
  const int next = (self.rank + 1) % self.world_size;
  const int previous = (self.rank + self.world_size - 1) % self.world_size;
  for (int i = 0; i < 40; ++i) {
    std::byte out{static_cast<unsigned char>(self.rank + i)};
    std::byte in{};
    MessageRequest receive{.receives = true, .peer = previous, .tag = i, .block = {&in, 1}};
    const auto received = communicator.submit(std::move(receive));
    communicator.run(MessageRequest{.peer = next, .tag = i, .block = {&out, 1}}, nullptr);
    communicator.wait(received, std::nullopt, nullptr);
    check(in == std::byte{static_cast<unsigned char>(previous + i)}, "message ", i, " is wrong");
  }
}

void beside(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      std::exception_ptr error;
      std::thread other([&] {
        try {
          pass_bytes(self, self.communicator);
        } catch (...) {
          error = std::current_exception();
        }
      });
      try {
        for (uint64_t turn = 0; turn < 60; ++turn) one_turn(self, turn);
      } catch (...) {
        other.join();
        throw;
      }
      other.join();
      if (error) std::rethrow_exception(error);
    });
  });
}

// One rank's other thread gives the group up: every rank's call ends with an error, and none waits.
void aborted(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      std::thread other;
      if (self.rank == 0) {
        other = std::thread([&self] {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          self.communicator.abort("the scenario asks for it");
        });
      }
      bool ended = false;
      try {
        const Deadline deadline = Deadline::after(std::chrono::seconds(20));
        for (uint64_t turn = 0; !deadline.passed(); ++turn) {
          Sum sum(self, turn);
          self.communicator.run(sum.call(), nullptr);
          sum.verify();
        }
      } catch (const Error&) {
        ended = true;
      }
      if (other.joinable()) other.join();
      check(ended, "calls went on though the group was given up");
      bool refused = false;
      try {
        Sum sum(self, 0);
        self.communicator.run(sum.call(), nullptr);
      } catch (const Error&) {
        refused = true;
      }
      check(refused, "a call on a dead group succeeded");
    });
  });
}

// How a rank's calls ended: by an error, as they must, before its patience was at an end.
void call_until_error(Rank& self, const std::function<void(Sum&, uint64_t)>& run) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(20));
  for (uint64_t turn = 0; !deadline.passed(); ++turn) {
    Sum sum(self, turn);
    try {
      run(sum, turn);
    } catch (const Error&) {
      return;
    }
    sum.verify();
  }
  check(false, "calls went on though the group had an end");
}

// A signal handler throws in the middle of a wait, on one rank.
void interrupted(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      struct Stop {};
      uint64_t left = 1 + self.rng.below(20);
      const Interrupt interrupt = [&] {
        if (--left == 0) throw Stop{};
      };
      bool stopped = false;
      call_until_error(self, [&](Sum& sum, uint64_t) {
        if (self.rank != 0) return self.communicator.run(sum.call(), nullptr);
        self.delays.maybe();
        try {
          self.communicator.run(sum.call(), interrupt);
        } catch (const Stop&) {
          check(self.communicator.dead(), "an interrupted call left its group alive");
          stopped = true;
          self.communicator.throw_if_dead();
        }
      });
      check(self.rank != 0 || stopped, "another error was thrown than the interruption");
    });
  });
}

// One rank comes late, and the others have no time at all, or a millisecond.
void out_of_time(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      const uint64_t late = 3 + self.agreed.below(10);
      const std::chrono::milliseconds limit(self.agreed.below(2));
      call_until_error(self, [&](Sum& sum, uint64_t turn) {
        PlainCall call = sum.call();
        if (turn < late) return self.communicator.run(call, nullptr);
        if (self.rank == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
        } else {
          call.timeout = limit;
        }
        self.communicator.run(call, nullptr);
      });
    });
  });
}

// Another thread of one rank closes the group, which takes until no call is inside.
void closed(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      std::atomic<bool> open{true};
      std::thread other;
      if (self.rank == 0) {
        other = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          open = false;
          self.communicator.close();
        });
      }
      try {
        call_until_error(self, [&](Sum& sum, uint64_t) {
          // A moment in which nothing is inside.
          if (!open) std::this_thread::sleep_for(std::chrono::milliseconds(30));
          self.communicator.run(sum.call(), nullptr);
        });
      } catch (...) {
        if (other.joinable()) other.join();
        throw;
      }
      if (other.joinable()) other.join();
    });
  });
}

}  // namespace

std::vector<Scenario> at_once_scenarios() {
  return {
      {"at_once/beside", "calls at once beside messages and queued calls of the same rank", beside},
      {"at_once/aborted", "a group that is given up by another thread", aborted},
      {"at_once/interrupted", "a signal handler throws in a wait", interrupted},
      {"at_once/out_of_time", "timeouts of 0 and 1 ms while a rank is late", out_of_time},
      {"at_once/closed", "a group that is closed by another thread", closed},
  };
}

}  // namespace pycoll::stress
