// Calls over codecs: two lanes and their threads, beside calls of the group itself, and their ends.
#include <atomic>
#include <cmath>
#include <memory>
#include <thread>

#include "runtime/codec_group.h"
#include "scenario.h"

namespace pycoll::stress {
namespace {

std::shared_ptr<CodecGroup> codecs_of(Rank& self) {
  // The communicator is the world's, and outlives this.
  auto made = CodecGroup::make({&self.communicator, [](Communicator*) {}});
  made->connect(nullptr, {});  // what is looked at comes later
  return made;
}

// A vector of each rank whose sum codecs hold exactly, but for roundings: blocks are constant.
class Sum {
 public:
  Sum(Rank& self, uint64_t turn) : world_size_(self.world_size) {
    const uint64_t lengths[] = {1, 300, 5000, 200'000};
    values_.assign(lengths[self.agreed.below(std::size(lengths))],
                   static_cast<float>(self.rank + 1) * scale(turn));
    expected_ = static_cast<float>(world_size_ * (world_size_ + 1) / 2) * scale(turn);
    const CodecKind kinds[] = {CodecKind::fp16, CodecKind::int8, CodecKind::uint4, CodecKind::sign};
    codec_.kind = kinds[self.agreed.below(std::size(kinds))];
  }

  CodecRequest request() {
    CodecRequest request;
    request.collective = Collective::all_reduce;
    request.dtype = DType::float32;
    request.codec = codec_;
    request.reduce_op = ReduceOp::sum;
    request.input.blocks.push_back({reinterpret_cast<std::byte*>(values_.data()), values_.size()});
    request.output = request.input;
    return request;
  }
  CallRequest plain() { return request(); }
  // After `calls` of them, one after the other.
  void verify(int calls = 1) const {
    const float expected = expected_ * std::pow(static_cast<float>(world_size_), float(calls - 1));
    for (uint64_t i = 0; i < values_.size(); ++i) {
      check(std::abs(values_[i] - expected) <= expected * 1e-3f, "element ", i, " is ", values_[i],
            ", not ", expected);
    }
  }

 private:
  static float scale(uint64_t turn) { return static_cast<float>(turn % 17 + 1); }

  int world_size_;
  std::vector<float> values_;
  float expected_;
  Codec codec_;
};

// A constant vector of each rank, gathered.
class Gather {
 public:
  explicit Gather(Rank& self)
      : world_size_(static_cast<size_t>(self.world_size)),
        count_(self.agreed.below(2) == 0 ? 300 : 70'000),
        mine_(count_, static_cast<float>(self.rank + 1)),
        all_(count_ * world_size_) {}

  CodecRequest request() {
    CodecRequest request;
    request.collective = Collective::all_gather;
    request.dtype = DType::float32;
    request.codec.kind = CodecKind::fp16;
    request.input.blocks.push_back({reinterpret_cast<std::byte*>(mine_.data()), count_});
    for (size_t peer = 0; peer < world_size_; ++peer) {
      float* block = all_.data() + peer * count_;
      request.output.blocks.push_back({reinterpret_cast<std::byte*>(block), count_});
    }
    return request;
  }
  void verify() const {
    for (size_t i = 0; i < all_.size(); ++i) {
      const auto expected = static_cast<float>(i / count_ + 1);
      check(all_[i] == expected, "element ", i, " is ", all_[i], ", not ", expected);
    }
  }

 private:
  size_t world_size_;
  uint64_t count_;
  std::vector<float> mine_;
  std::vector<float> all_;
};

// Several calls under way, with calls of the group itself between them.
void beside(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      const auto codecs = codecs_of(self);
      for (uint64_t turn = 0; turn < 3; ++turn) {
        Sum first(self, turn), exact(self, turn + 1), second(self, turn + 2);
        Gather gather(self);
        const auto one = codecs->submit(first.request());
        const auto other = self.communicator.submit(exact.plain());
        self.delays.maybe();
        const auto gathered = codecs->submit(gather.request());
        const auto two = codecs->submit(second.request());
        self.delays.maybe();
        check(two->wait(std::nullopt, nullptr), "a wait without a limit ended");
        check(self.communicator.wait(other, std::nullopt, nullptr), "so did this");
        check(one->wait(std::nullopt, nullptr), "and this");
        check(gathered->wait(std::nullopt, nullptr), "and this");
        gather.verify();
        first.verify();
        exact.verify();
        second.verify();
      }
    });
  });
}

// Calls on one vector, some with a codec and some without, all under way before the first is waited
// for; and one at the end by whoever may take the short way.
void one_memory(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      const auto codecs = codecs_of(self);
      for (uint64_t turn = 0; turn < 3; ++turn) {
        Sum sum(self, turn);
        const CallRequest plain = sum.plain();
        const auto let_end = [&] { codecs->let_end(plain, nullptr); };
        constexpr int kCalls = 4;
        std::vector<std::shared_ptr<CompressedCall>> compressed;
        std::vector<std::shared_ptr<Operation>> exact;
        for (int call = 0; call < kCalls; ++call) {
          self.delays.maybe();
          if (self.agreed.below(2) == 0) {
            compressed.push_back(codecs->submit(sum.request()));
          } else {
            let_end();
            exact.push_back(self.communicator.submit(sum.plain()));
          }
        }
        if (self.agreed.below(2) == 0) {
          let_end();
        } else {
          while (!codecs->idle()) std::this_thread::yield();  // a failure ends them, too
        }
        self.communicator.run(sum.plain(), nullptr);
        sum.verify(kCalls + 1);
        for (const auto& call : compressed) {
          check(call->wait(std::chrono::seconds(5), nullptr), "an idle group has a call under way");
        }
        for (const auto& call : exact) check(call->done(), "a later call ended first");
      }
    });
  });
}

// Calls until one throws, which must be soon.
void call_until_error(Rank& self, CodecGroup& codecs, const Interrupt& interrupt) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(20));
  for (uint64_t turn = 0; !deadline.passed(); ++turn) {
    Sum sum(self, turn);
    try {
      codecs.submit(sum.request())->wait(std::nullopt, interrupt);
    } catch (const Error&) {
      return;
    }
    sum.verify();
  }
  check(false, "calls went on though the group had an end");
}

void aborted(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      const auto codecs = codecs_of(self);
      std::thread other;
      if (self.rank == 0) {
        other = std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          self.communicator.abort("enough");
        });
      }
      try {
        call_until_error(self, *codecs, nullptr);
      } catch (...) {
        if (other.joinable()) other.join();
        throw;
      }
      if (other.joinable()) other.join();
    });
  });
}

// A signal handler throws in a wait for a rank that does not come.
void interrupted(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      struct Stop {};
      const auto codecs = codecs_of(self);
      Sum sum(self, 0);
      if (self.rank == 0) {
        try {
          codecs->submit(sum.request())->wait(std::nullopt, [] { throw Stop{}; });
          check(false, "a call ended without its peers");
        } catch (const Stop&) {
          check(self.communicator.dead(), "an interrupted call left its group alive");
        }
        return;
      }
      while (!self.communicator.peer_abort()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      call_until_error(self, *codecs, nullptr);
    });
  });
}

// Whoever has waited for a call may drop the group: its threads end before that returns, the one
// that is still in a callback, too. In a thread nobody waits for they would outlive main().
void dropped(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      std::atomic<bool> called{false};
      {
        const auto codecs = codecs_of(self);
        Sum sum(self, 0);
        CodecRequest request = sum.request();
        request.on_complete = [&called] {
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
          called = true;
        };
        check(codecs->submit(std::move(request))->wait(std::nullopt, nullptr), "a wait ended");
        sum.verify();
      }
      check(called, "a thread of the group has outlived it");
    });
  });
}

}  // namespace

std::vector<Scenario> codec_scenarios() {
  return {
      {"codecs/beside", "calls over codecs beside calls of the group itself", beside},
      {"codecs/one_memory", "calls on one vector, with codecs and without", one_memory},
      {"codecs/aborted", "a group that is given up by another thread", aborted},
      {"codecs/dropped", "a group that is dropped while a callback of its last call runs", dropped},
      {"codecs/interrupted", "a signal handler throws in a wait", interrupted},
  };
}

}  // namespace pycoll::stress
