// The arena under threads: blocks that others free, ranges that are quarantined meanwhile.
#include <sys/mman.h>

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
        "another thread has this block too, or a peer wrote there");
}

// What a peer sees of the arena, in a mapping of its own.
Mapping map_as_peer(const Arena& arena) {
  void* const place =
      ::mmap(nullptr, arena.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd(), 0);
  check(place != MAP_FAILED, "no address space for a second mapping");
  return {place, arena.bytes()};
}

void churn(Arena& arena, std::byte* peer, Mailbox& mailbox, uint64_t seed) {
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
    const uint64_t offset = *arena.offset_of(old, freed_bytes);
    const uint64_t ticket = arena.quarantine(offset, freed_bytes);
    for (const uint64_t at : {uint64_t{0}, freed_bytes - 8}) {
      *reinterpret_cast<uint64_t*>(peer + offset + at) = seed;
    }
    check_marks(old);
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
    const Mapping peer = map_as_peer(*arena);
    Mailbox mailbox{};
    run_threads(kThreads, [&](int rank) {
      churn(*arena, peer.data(), mailbox, mix(settings.seed * 1000 + episode * 10 + rank));
    });
    for (auto& each : mailbox) arena->free(each.load());
    const Arena::Statistics end = arena->statistics();
    check(end.live == 0 && end.blocks == 0 && end.quarantined == 0, "a block was lost");
    check(arena->allocate(kArenaBytes) == arena->base(), "room was lost");
    check(arena->offset_of(arena->base(), kArenaBytes) == 0, "memory is not shared again");
    ++episode;
  } while (!settings.until.passed());
}

}  // namespace

std::vector<Scenario> arena_scenarios() {
  return {{"arena", "blocks that any thread frees, some of them quarantined", arena_churn}};
}

}  // namespace pycoll::stress
