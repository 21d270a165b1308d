// The arena under threads: blocks that others free, ranges that are quarantined meanwhile.
#include <array>
#include <atomic>
#include <thread>

#include "random.h"
#include "scenario.h"
#include "transport/shm/arena.h"

namespace pycoll::stress {
namespace {

using shm::Arena;

constexpr uint64_t kArenaBytes = 32 * Arena::kGranule;
constexpr int kThreads = 3;
constexpr int kSteps = 400;

// Block addresses that wait for whoever comes by. What a block holds is written before it is put
// here, and checked by the thread that takes it out.
using Mailbox = std::array<std::atomic<uint64_t*>, 8>;

void check_marks(const uint64_t* block) {
  const uint64_t bytes = block[1];
  check(block[0] == mix(bytes) && block[bytes / 8 - 1] == block[0],
        "another thread has this block too");
}

void churn(Arena& arena, Mailbox& mailbox, uint64_t seed) {
  Rng random(seed);
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t bytes = 64 + random.below(3 * Arena::kGranule) / 8 * 8;
    auto* const block = static_cast<uint64_t*>(arena.allocate(bytes));
    if (block != nullptr) {
      block[1] = bytes;
      block[0] = block[bytes / 8 - 1] = mix(bytes);
    }
    // Release: what was written above; acquire: what the other thread wrote.
    uint64_t* const old =
        mailbox[random.below(mailbox.size())].exchange(block, std::memory_order_acq_rel);
    if (old == nullptr) continue;
    check_marks(old);
    if (!random.one_in(4)) {
      arena.free(old);
      continue;
    }
    // An operation that was given up: the caller frees, a peer writes, then it is over.
    const uint64_t freed_bytes = old[1];
    const uint64_t ticket = arena.quarantine(*arena.offset_of(old, freed_bytes), freed_bytes);
    arena.free(old);
    old[0] = seed;
    std::this_thread::yield();
    check(old[0] == seed, "a quarantined block was given away");
    arena.release(ticket);
  }
}

void arena_churn(const Settings& settings) {
  uint64_t episode = 0;
  do {
    const auto arena = Arena::make(kArenaBytes, {4 * Arena::kGranule, episode % 2 == 0});
    Mailbox mailbox{};
    run_threads(kThreads, [&](int rank) {
      churn(*arena, mailbox, mix(settings.seed * 1000 + episode * 10 + rank));
    });
    for (auto& each : mailbox) arena->free(each.load());
    const Arena::Statistics end = arena->statistics();
    check(end.live == 0 && end.blocks == 0 && end.quarantined == 0, "a block was lost");
    check(arena->allocate(kArenaBytes) == arena->base(), "room was lost");
    ++episode;
  } while (!settings.until.passed());
}

}  // namespace

std::vector<Scenario> arena_scenarios() {
  return {{"arena", "blocks that any thread frees, some of them quarantined", arena_churn}};
}

}  // namespace pycoll::stress
