// Scenarios in which every operation succeeds: many small collectives back to back.
#include <atomic>
#include <deque>
#include <thread>

#include "cases.h"
#include "scenario.h"

namespace pycoll::stress {

void run_episodes(const Settings& settings,
                  const std::function<void(const WorldOptions&)>& episode) {
  constexpr int kSizes = 3;
  for (uint64_t i = 0; i < kSizes || !settings.until.passed(); ++i) {
    WorldOptions options;
    options.world_size = 2 + static_cast<int>(i % kSizes);
    options.seed = mix(settings.seed) + i;
    options.timeout = settings.patience;
    options.config.spin_us = (settings.seed + i / kSizes) % 2 == 0 ? 0 : -1;
    episode(options);
  }
}

namespace {

const Algorithm& draw_algorithm(Rng& agreed) {
  return algorithms()[agreed.below(algorithms().size())];
}

void run_one(Rank& self, const Algorithm& algorithm) {
  const Case drawn = draw_case(algorithm, self.world_size, self.agreed);
  Vectors vectors(drawn, self.rank, self.world_size);
  self.communicator.run(vectors.request(), nullptr);
  vectors.check_result();
  self.delays.maybe();
}

// An algorithm alone: nothing else orders what it fails to order.
void one_algorithm(const Settings& settings, const Algorithm& algorithm) {
  run_episodes(settings, [&](const WorldOptions& options) {
    run_world(options, [&](Rank& self) {
      for (int i = 0; i < 60; ++i) run_one(self, algorithm);
    });
  });
}

void mixed(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      for (int i = 0; i < 100; ++i) run_one(self, draw_algorithm(self.agreed));
    });
  });
}

// Operations in flight, each with its vectors.
class Batch {
 public:
  void submit(Rank& self) {
    const Case drawn = draw_case(draw_algorithm(self.agreed), self.world_size, self.agreed);
    vectors_.emplace_back(drawn, self.rank, self.world_size);
    operations_.push_back(self.communicator.submit(vectors_.back().request()));
  }
  size_t size() const { return operations_.size(); }

  void wait(Communicator& communicator, size_t i) const {
    check(communicator.wait(operations_[i], std::nullopt, nullptr), "wait() without a limit ended");
    vectors_[i].check_result();
  }
  // As done() promises: whoever sees true sees the result, without a lock.
  void poll(size_t i) const {
    const Deadline deadline = Deadline::after(std::chrono::seconds(30));
    while (!operations_[i]->done()) {
      check(!deadline.passed(), "operation ", i, " was not done within 30 s");
      std::this_thread::yield();
    }
    check(operations_[i]->error() == nullptr, "operation ", i, " failed");
    vectors_[i].check_result();
  }

 private:
  std::deque<Vectors> vectors_;
  std::vector<std::shared_ptr<Operation>> operations_;
};

void async_body(Rank& self) {
  for (int round = 0; round < 6; ++round) {
    Batch batch;
    for (int i = 0; i < 8; ++i) batch.submit(self);
    std::string complaints[2];
    const auto guarded = [&](int which, const std::function<void()>& body) {
      return std::thread([&complaints, which, body] {
        try {
          body();
        } catch (const std::exception& error) {
          complaints[which] = error.what();
        }
      });
    };
    std::thread poller = guarded(0, [&] {
      for (size_t i = 0; i < batch.size(); i += 2) batch.poll(i);
    });
    std::thread waiter = guarded(1, [&] {
      for (size_t i = batch.size(); i-- > 0;) batch.wait(self.communicator, i);
    });
    // A synchronous call meanwhile, which may find a full queue and another thread driving.
    try {
      run_one(self, draw_algorithm(self.agreed));
    } catch (const std::exception& error) {
      complaints[0] += concat(" synchronous: ", error.what());
    }
    poller.join();
    waiter.join();
    check(complaints[0].empty() && complaints[1].empty(), complaints[0], " ", complaints[1]);
  }
}

void async(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) { run_world(options, async_body); });
}

bool becomes_true(const std::atomic<bool>& flag) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (!flag.load() && !deadline.passed()) std::this_thread::yield();
  return flag.load();
}

// The schedule that loses a wake-up when the sleeper does not look again: the peer does its part
// after the sleeper's last look and before the sleeper says that it sleeps.
void recheck_once(const Algorithm& algorithm, uint64_t seed) {
  std::atomic<bool> connected{false};  // ranks sleep while they connect, too
  std::atomic<bool> about_to_sleep{false};
  std::atomic<bool> peer_done{false};
  std::atomic<int> sleeps{0};
  WorldOptions options;
  options.seed = seed;
  options.delays = false;
  options.config.spin_us = 0;
  options.hooks[1].before_prepare_sleep = [&] {
    if (!connected) return;
    about_to_sleep = true;
    becomes_true(peer_done);
  };
  options.hooks[1].before_sleep = [&] { sleeps += peer_done ? 1 : 0; };
  run_world(options, [&](Rank& self) {
    const Case one{&algorithm, DType::int32, ReduceOp::none, 5, 0, false, seed};
    Vectors vectors(one, self.rank, self.world_size);
    if (self.rank == 1) connected = true;
    if (self.rank == 0) check(becomes_true(about_to_sleep), "rank 1 never went to sleep");
    self.communicator.run(vectors.request(), nullptr);
    if (self.rank == 0) peer_done = true;
    vectors.check_result();
  });
  check(sleeps == 0, algorithm.name, ": rank 1 went to sleep though its message was there");
}

void recheck(const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    recheck_once(*find_algorithm(Collective::broadcast, "tree"), seed++);
    recheck_once(*find_algorithm(Collective::broadcast, "one_shot"), seed++);
  } while (!settings.until.passed());
}

}  // namespace

std::vector<Scenario> collective_scenarios() {
  std::vector<Scenario> all;
  for (const Algorithm& algorithm : algorithms()) {
    all.push_back({concat(name_of(algorithm.collective), "/", algorithm.name),
                   "that algorithm alone, back to back",
                   [&algorithm](const Settings& s) { one_algorithm(s, algorithm); }});
  }
  all.push_back({"mixed", "all collectives and algorithms in turn", mixed});
  all.push_back({"async", "submitted, waited for and polled by several threads", async});
  all.push_back({"recheck", "a message that comes just before the receiver sleeps", recheck});
  return all;
}

}  // namespace pycoll::stress
