// Scenarios of point-to-point messages: posted in any order, alone and beside collectives.
#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>

#include "cases.h"
#include "scenario.h"

namespace pycoll::stress {
namespace {

// The n-th message of a pair of ranks with its tag; all ranks draw the same ones.
struct Letter {
  int from;
  int to;
  int tag;
  uint64_t bytes;
  uint64_t salt;

  std::byte at(uint64_t i) const { return static_cast<std::byte>(mix(salt + i)); }
};

std::vector<Letter> draw_letters(int world_size, Rng& agreed, int count) {
  // Nothing, within the smallest slot's payload, just beyond, many slices.
  constexpr uint64_t kSizes[] = {0, 1, 15, 16, 17, 333, 4000};
  std::vector<Letter> letters;
  for (int i = 0; i < count; ++i) {
    const int from = static_cast<int>(agreed.below(static_cast<uint64_t>(world_size)));
    const int step = 1 + static_cast<int>(agreed.below(static_cast<uint64_t>(world_size - 1)));
    letters.push_back({from, (from + step) % world_size, static_cast<int>(agreed.below(3)),
                       kSizes[agreed.below(std::size(kSizes))], agreed.next()});
  }
  return letters;
}

// One side of one letter, with memory of exactly its size.
struct Posted {
  const Letter* letter;
  bool receives;
  std::vector<std::byte> memory;
  std::shared_ptr<Operation> operation;

  Posted(const Letter& l, bool r) : letter(&l), receives(r), memory(l.bytes) {
    for (uint64_t i = 0; i < l.bytes && !r; ++i) memory[i] = l.at(i);
  }
  MessageRequest request() {
    MessageRequest request;
    request.receives = receives;
    request.peer = receives ? letter->from : letter->to;
    request.tag = letter->tag;
    request.block = {memory.data(), memory.size()};
    return request;
  }
  void verify(Rank& self) {
    check(self.communicator.wait(operation, std::nullopt, nullptr), "wait() without a limit ended");
    for (uint64_t i = 0; i < memory.size(); ++i) {
      check(memory[i] == letter->at(i), operation->describe(), " of ", letter->bytes,
            " bytes is wrong at ", i);
    }
  }
};

// This rank's sides of all letters. Letters with one sender, receiver and tag stay in order; the
// order of everything else is this rank's own.
std::deque<Posted> shuffle(Rank& self, const std::vector<Letter>& letters) {
  std::deque<Posted> mine;
  for (const Letter& letter : letters) {
    if (letter.from != self.rank && letter.to != self.rank) continue;
    mine.emplace_back(letter, letter.to == self.rank);
  }
  const auto same_stream = [](const Posted& a, const Posted& b) {
    return a.letter->from == b.letter->from && a.letter->to == b.letter->to &&
           a.letter->tag == b.letter->tag;
  };
  for (size_t i = 0; i + 1 < 4 * mine.size(); ++i) {
    const size_t at = self.rng.below(mine.size() - 1);
    if (!same_stream(mine[at], mine[at + 1])) std::swap(mine[at], mine[at + 1]);
  }
  return mine;
}

void exchange(Rank& self, bool beside_collectives) {
  const std::vector<Letter> letters = draw_letters(self.world_size, self.agreed, 40);
  std::deque<Posted> mine = shuffle(self, letters);
  const uint64_t collectives = beside_collectives ? 6 : 0;
  uint64_t done = 0;
  const auto collective = [&] {
    const auto rows = algorithms();
    const Case drawn =
        draw_case(rows[self.agreed.below(rows.size())], self.world_size, self.agreed);
    Vectors vectors(drawn, self.rank, self.world_size);
    self.communicator.run(vectors.request(), nullptr);
    vectors.check_result();
    ++done;
  };
  for (Posted& posted : mine) {
    posted.operation = self.communicator.submit(posted.request());
    self.delays.maybe();
    if (done < collectives && self.rng.one_in(4)) collective();
  }
  while (done < collectives) collective();
  for (size_t i = mine.size(); i > 1; --i) std::swap(mine[i - 1], mine[self.rng.below(i)]);
  for (Posted& posted : mine) posted.verify(self);
}

void messages(const Settings& settings, bool beside_collectives) {
  run_episodes(settings, [&](const WorldOptions& options) {
    run_world(options, [&](Rank& self) {
      for (int i = 0; i < 5; ++i) exchange(self, beside_collectives);
    });
  });
}

// Blocking calls alone: nobody but the callers drives.
void blocking(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      const int next = (self.rank + 1) % self.world_size;
      const int previous = (self.rank + self.world_size - 1) % self.world_size;
      for (int i = 0; i < 30; ++i) {
        // Everybody sends first: small messages do not wait for their receive.
        const Letter out{self.rank, next, i, 8, static_cast<uint64_t>(self.rank * 1000 + i)};
        const Letter in{previous, self.rank, i, 8, static_cast<uint64_t>(previous * 1000 + i)};
        Posted send(out, false);
        Posted receive(in, true);
        send.operation = self.communicator.run(send.request(), nullptr);
        self.delays.maybe();
        receive.operation = self.communicator.run(receive.request(), nullptr);
        receive.verify(self);
      }
    });
  });
}

// A sender far ahead of its receiver: more than the credit, of messages that are received last to
// first, so that all must be announced before the first is received. They fit the credit; those
// that follow them do not, and wait.
void run_ahead(const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    WorldOptions options;
    options.seed = seed++;
    run_world(options, [](Rank& self) {
      constexpr int kTags = 4000;
      std::deque<Letter> letters;
      std::deque<Posted> mine;
      for (int i = 0; i < 2 * kTags; ++i) {
        letters.push_back({0, 1, i % kTags, 2, self.agreed.next()});
        mine.emplace_back(letters.back(), self.rank == 1);
      }
      if (self.rank == 0) {
        for (Posted& send : mine) send.operation = self.communicator.submit(send.request());
      } else {
        for (int round = 0; round < 2; ++round) {
          for (int tag = kTags - 1; tag >= 0; --tag) {
            Posted& receive = mine[static_cast<size_t>(round * kTags + tag)];
            receive.operation = self.communicator.run(receive.request(), nullptr);
          }
        }
      }
      for (Posted& posted : mine) posted.verify(self);
    });
  } while (!settings.until.passed());
}

// A receiver that takes messages in while it waits for another rank, and asks for none of them: the
// sender stops at its credit.
void bounded(const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    WorldOptions options;
    options.world_size = 3;
    options.seed = seed++;
    run_world(options, [](Rank& self) {
      constexpr int kMessages = 5000;
      constexpr int kCredit = 4096;
      std::byte word{};
      const auto one = [&](bool receives, int peer, int tag) {
        MessageRequest request{.receives = receives, .peer = peer, .tag = tag};
        request.block = {&word, 1};
        return request;
      };
      if (self.rank == 0) {
        std::vector<std::shared_ptr<Operation>> sends;
        for (int i = 0; i < kMessages; ++i) {
          sends.push_back(self.communicator.submit(one(false, 1, 0)));
        }
        const auto sent = [&] {
          return std::count_if(sends.begin(), sends.end(), [](const auto& s) { return s->done(); });
        };
        const Deadline deadline = Deadline::after(std::chrono::seconds(20));
        while (sent() < kCredit / 2 && !deadline.passed()) std::this_thread::yield();
        // On a busy machine that is far from all that it would send: until nothing has moved.
        constexpr auto kStill = std::chrono::milliseconds(200);
        for (auto before = sent() - 1; before != sent() && !deadline.passed();) {
          before = sent();
          std::this_thread::sleep_for(kStill);
        }
        check(sent() <= kCredit, sent(), " messages without a receive were sent");
        self.communicator.run(one(false, 2, 0), nullptr);
        for (const auto& send : sends) self.communicator.wait(send, std::nullopt, nullptr);
      } else if (self.rank == 2) {
        self.communicator.run(one(true, 0, 0), nullptr);
        self.communicator.run(one(false, 1, 0), nullptr);
      } else {
        self.communicator.run(one(true, 2, 0), nullptr);
        for (int i = 0; i < kMessages; ++i) self.communicator.run(one(true, 0, 0), nullptr);
      }
    });
  } while (!settings.until.passed());
}

void any_source(const Settings& settings) {
  run_episodes(settings, [](const WorldOptions& options) {
    run_world(options, [](Rank& self) {
      constexpr uint64_t kEach = 20;
      if (self.rank != 0) {
        for (uint64_t i = 0; i < kEach; ++i) {
          uint64_t words[5] = {static_cast<uint64_t>(self.rank), i, i, i, i};
          MessageRequest send;
          send.block = {reinterpret_cast<std::byte*>(words), i % 2 == 0 ? 16u : 40u};
          self.communicator.run(std::move(send), nullptr);
          self.delays.maybe();
        }
        return;
      }
      std::vector<uint64_t> seen(static_cast<size_t>(self.world_size), 0);
      const uint64_t total = kEach * static_cast<uint64_t>(self.world_size - 1);
      for (uint64_t i = 0; i < total; i += 2) {
        // Each sender's messages come in order, so the next length of each is known, but not whose
        // turn it is: receive the first of a pair, then from the same rank the second.
        uint64_t words[5] = {};
        MessageRequest first{.receives = true, .peer = kAnySource};
        first.block = {reinterpret_cast<std::byte*>(words), 16};
        const int from = self.communicator.run(first, nullptr)->source();
        check(words[0] == static_cast<uint64_t>(from), "source ", from, " sent ", words[0]);
        check(words[1] == seen[static_cast<size_t>(from)], "message ", words[1], " of rank ", from,
              " came out of order");
        MessageRequest second{.receives = true, .peer = from};
        second.block = {reinterpret_cast<std::byte*>(words), 40};
        self.communicator.run(second, nullptr);
        check(words[4] == seen[static_cast<size_t>(from)] + 1, "the second of a pair is wrong");
        seen[static_cast<size_t>(from)] += 2;
      }
    });
  });
}

// A message that is posted just before the driving thread sleeps is not slept over.
void post_recheck(const Settings& settings) {
  uint64_t seed = settings.seed;
  do {
    // All but `sleeper` belong to rank 1's driving thread.
    std::atomic<Communicator*> sleeper{nullptr};
    std::shared_ptr<Operation> sent;
    int slept_over = 0;
    std::byte word{};
    WorldOptions options;
    options.seed = seed++;
    options.delays = false;
    options.config.spin_us = 0;
    options.hooks[1].before_prepare_sleep = [&] {
      if (sent == nullptr && sleeper != nullptr) {
        sent = sleeper.load()->submit(MessageRequest{.block = {&word, 1}});
      }
    };
    options.hooks[1].before_sleep = [&] { slept_over += sent && !sent->done() ? 1 : 0; };
    run_world(options, [&](Rank& self) {
      std::byte got{};
      MessageRequest receive{.receives = true, .peer = 1 - self.rank, .block = {&got, 1}};
      if (self.rank == 1) sleeper = &self.communicator;
      self.communicator.run(std::move(receive), nullptr);
      // Rank 0 answers only once rank 1's message has come.
      if (self.rank == 0) {
        self.communicator.run(MessageRequest{.peer = 1, .block = {&got, 1}}, nullptr);
      }
    });
    check(slept_over == 0, "went to sleep though a message was posted");
    sent.reset();
  } while (!settings.until.passed());
}

}  // namespace

std::vector<Scenario> message_scenarios() {
  return {
      {"messages/alone", "sends and receives posted in any order",
       [](const Settings& s) { messages(s, false); }},
      {"messages/beside", "the same beside collectives",
       [](const Settings& s) { messages(s, true); }},
      {"messages/blocking", "blocking calls: everybody sends first", blocking},
      {"messages/run_ahead", "a sender beyond its credit", run_ahead},
      {"messages/bounded", "a receiver that takes in and does not receive", bounded},
      {"messages/any_source", "receives that take from whoever comes first", any_source},
      {"messages/recheck", "a message posted just before its driver sleeps", post_recheck},
  };
}

}  // namespace pycoll::stress
