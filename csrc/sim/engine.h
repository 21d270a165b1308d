// The executor behind simt.h: admits blocks, switches between threads, notices when nothing can
// change any more.
#pragma once

#include <pthread.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/schedule.h"
#include "sim/threads.h"

namespace pycoll::sim {

class Engine {
 public:
  explicit Engine(const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;

  void launch(Grid grid);
  bool step(uint64_t max_switches);
  Stats run();
  const Stats& stats() const { return stats_; }

  // ---- For threads that run (kernel_side.cpp). ----

  Schedule& schedule() { return schedule_; }
  Stats& counters() { return stats_; }
  unsigned preempt_one_in() const { return options_.preempt_one_in; }
  void suspend(Thread& thread);                   // others run; returns when it is picked again
  void block(Thread& thread, ThreadState state);  // suspend until wake()
  void wake(Thread& thread);
  void spun(Thread& thread);  // it looked for a change and found none
  void progressed();          // what somebody may wait for has changed
  [[noreturn]] void fail(const std::string& why, const Block* only = nullptr) const;

 private:
  static void thread_main();

  bool begin_slice();
  void end_slice();
  bool slice_over();
  void claim_owner();

  void admit();
  void start_block(LiveGrid& grid);
  void end_block(Block& block);
  std::unique_ptr<LiveGrid> advance(uint64_t& switches);
  void resume(Thread& thread);
  std::unique_ptr<LiveGrid> after(Thread& thread);
  std::unique_ptr<LiveGrid> thread_exited(Thread& thread);
  void finish(std::unique_ptr<LiveGrid> grid);
  void look_for_deadlock();
  void wait_outside();
  std::string occupancy() const;

  using Clock = std::chrono::steady_clock;

  const Options options_;
  Schedule schedule_;
  Stats stats_;
  StackPool stacks_;
  FiberFactory factory_;
  Home home_;
  pthread_t owner_{};  // the OS thread that steps while there are grids
  bool owned_ = false;

  std::vector<std::unique_ptr<LiveGrid>> grids_;
  std::vector<std::unique_ptr<Block>> blocks_;  // resident
  std::map<int, size_t> resident_;              // blocks of each device

  // Threads wait at barriers and warp operations (blocked) or have spun since the last change
  // (stuck). When that is all of them, only the outside can change anything; after some more spins
  // in which nothing did, that is a deadlock, or with peers outside a reason to yield the CPU.
  uint64_t changes_ = 1;
  size_t live_ = 0, blocked_ = 0, stuck_ = 0;
  uint64_t idle_spins_ = 0;
  bool waits_outside_ = false;
  Clock::time_point waits_since_{};
  unsigned naps_ = 0;
  uint64_t switches_in_slice_ = 0;
};

// The thread that runs on this OS thread, if one does.
struct Current {
  Engine* engine = nullptr;
  Thread* thread = nullptr;
};
Current current();

// Groups of threads by what they wait for, with the place in the kernel's source. Those that have
// spun since `changes` spin still, although one may just be on its way to look again.
struct Waiting {
  const std::vector<std::unique_ptr<Block>>& blocks;
  uint64_t changes;
};
std::string describe_threads(const Waiting& waiting, const Block* only);

// With kFailureExitCode, after the handler has had the report, or stderr if there is none.
[[noreturn]] void end_process(const std::string& report,
                              const std::function<void(const std::string&)>& handler = {});

}  // namespace pycoll::sim
