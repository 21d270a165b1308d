// The store-load fence of transport/shm/doorbell.h, as a litmus test.
//
// Per round, at the same moment on two CPUs:
//   sleeper   prepare_sleep(); is the flag up? else sleep()
//   waker     raise the flag; wake_if_sleeping()
// Without a fence on both sides each store may wait in its CPU's store buffer while the load that
// follows it is done: the sleeper misses the flag, the waker misses the sleeper. To make that wait
// long, both first write lines that the other CPU has just written: stores leave the buffer in
// order, so the one that matters queues behind those misses. Without that trick the chance is too
// small to see: the scenarios of `stress` run clean for a long time without either fence.
//
// A lost wake-up is a sleeper that has not seen the flag three seconds after the waker finished; a
// wake-up takes microseconds, and a busy machine keeps a thread waiting for tenths of a second.
// Exit code 0: none lost; 1: one lost; 77: this process may use one CPU only.
//
//   litmus [ROUNDS]
#include <pthread.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "random.h"
#include "runtime/wait.h"
#include "transport/shm/doorbell.h"

namespace {

using namespace pycoll;

constexpr auto kLost = std::chrono::seconds(3);
constexpr auto kLongest = std::chrono::seconds(30);
constexpr int kLines = 8;
// Of so many rounds one finds the sleeper asleep: its system call takes longer than a waker that
// leaves with it.
constexpr uint32_t kAsleep = 1000;

struct alignas(64) Word {
  std::atomic<uint32_t> value{0};
};

struct Shared {
  Word sleeping;
  Word flag;           // the last round that the waker raised
  Word sleeper_ready;  // the round that each has come to
  Word waker_ready;
  Word acknowledged;  // the last round whose flag the sleeper saw
  Word dirty[kLines];
  std::atomic<bool> lost{false};
};

void pin(std::thread& thread, int cpu) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  ::pthread_setaffinity_np(thread.native_handle(), sizeof(mask), &mask);
}

// Both threads leave together. The other may be off its CPU for a while, so yield in the end.
void meet(Word& mine, const Word& other, uint32_t round) {
  mine.value.store(round, std::memory_order_release);
  for (int look = 0; other.value.load(std::memory_order_acquire) < round; ++look) {
    look < 1000 ? cpu_relax() : static_cast<void>(::sched_yield());
  }
}

void linger(uint64_t pauses) {
  for (uint64_t i = 0; i < pauses; ++i) cpu_relax();
}

void fill_store_buffer(Shared& shared, uint32_t round) {
  for (Word& line : shared.dirty) line.value.store(round, std::memory_order_relaxed);
}

void sleeper(Shared& shared, uint32_t rounds) {
  stress::Rng rng(1);
  for (uint32_t round = 1; round <= rounds; ++round) {
    meet(shared.sleeper_ready, shared.waker_ready, round);
    if (shared.lost.load(std::memory_order_relaxed)) return;
    linger(rng.below(4));
    fill_store_buffer(shared, round);
    while (shared.flag.value.load(std::memory_order_acquire) < round) {
      shm::prepare_sleep(shared.sleeping.value);
      if (shared.flag.value.load(std::memory_order_acquire) >= round) {
        shm::cancel_sleep(shared.sleeping.value);
        break;
      }
      shm::sleep(shared.sleeping.value, kLongest);
    }
    shared.acknowledged.value.store(round, std::memory_order_release);
  }
}

bool acknowledged(const Shared& shared, uint32_t round) {
  return shared.acknowledged.value.load(std::memory_order_acquire) >= round;
}

void waker(Shared& shared, uint32_t rounds) {
  stress::Rng rng(2);
  for (uint32_t round = 1; round <= rounds; ++round) {
    meet(shared.waker_ready, shared.sleeper_ready, round);
    linger(round % kAsleep == 0 ? 20'000 : rng.below(4));
    fill_store_buffer(shared, round);
    shared.flag.value.store(round, std::memory_order_release);
    shm::wake_if_sleeping(shared.sleeping.value);
    for (int look = 0; look < 10'000 && !acknowledged(shared, round); ++look) cpu_relax();
    const Deadline deadline = Deadline::after(kLost);
    while (!acknowledged(shared, round) && !deadline.passed()) ::sched_yield();
    if (acknowledged(shared, round)) continue;
    std::printf("wake-up lost in round %u\n", round);
    shared.lost = true;
    shm::futex_wake_all(shared.sleeping.value);
    shared.waker_ready.value.store(rounds, std::memory_order_release);
    return;
  }
}

std::vector<int> allowed_cpus() {
  cpu_set_t mask;
  std::vector<int> cpus;
  if (::sched_getaffinity(0, sizeof(mask), &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<int> cpus = allowed_cpus();
  if (cpus.size() < 2) return 77;
  const auto rounds =
      static_cast<uint32_t>(argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1000000);
  Shared shared;
  std::thread first(sleeper, std::ref(shared), rounds);
  std::thread second(waker, std::ref(shared), rounds);
  pin(first, cpus[0]);
  pin(second, cpus[1]);
  first.join();
  second.join();
  if (shared.lost) return 1;
  std::printf("%u rounds, no wake-up lost\n", rounds);
  return 0;
}
