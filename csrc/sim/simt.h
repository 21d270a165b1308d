// Runs CUDA kernels on a CPU: each CUDA thread is a fiber, an executor is one OS thread's worth of
// them. For tests only; never part of a release.
//
// What it is for is finding bugs: schedules are a pure function of (policy, seed), barriers, warp
// operations and waits are checked, and a report names every group of threads with file:line. Under
// ThreadSanitizer kernels race unless their acquires and releases, with their scopes, order them
// (kernel_side.h); under AddressSanitizer each shared array ends where it ends.
//
// Executors are independent of one another: several OS threads may each have one. Whoever first
// steps an executor that has grids steps it until they are done.
//
// Under ThreadSanitizer: peers must be in the same process, memory mapped once, and about 240
// threads resident at a time.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace pycoll::sim {

class Engine;
class TimeSlice;
class Timeline;

enum class Policy : uint8_t {
  round_robin,  // block after block, each thread until it waits
  random,       // any thread, and switches at atomic accesses too
};

struct Options {
  Policy policy = Policy::round_robin;
  uint64_t seed = 1;
  unsigned preempt_one_in = 4;  // random: how often an atomic access lets others run; 0: never
  unsigned sticky = 64;  // random: turns in a row for one block, about; makes ranks drift apart
  unsigned max_resident = 0;  // blocks on a device at a time; 0: any number
  size_t stack_bytes = 64 << 10;
  // Peers are outside: other executors, other processes, the host. Waiting for them is no deadlock,
  // and yields the CPU; after timeout_s without any progress here it is reported.
  bool external = false;
  double timeout_s = 60;
  // Grids run only while this process has the GPU to itself (time_slice.h). Not owned.
  TimeSlice* time_slice = nullptr;
  // Gets the report of a failed check; prints it to stderr if it is empty. Then the process ends
  // with kFailureExitCode, because fibers cannot be unwound.
  std::function<void(const std::string& report)> on_failure;
};

inline constexpr int kFailureExitCode = 86;

struct Stats {
  uint64_t switches = 0;
  uint64_t barriers = 0;  // arrivals of threads
  uint64_t warp_operations = 0;
  uint64_t atomics = 0;
  uint64_t spins = 0;
  // Spins while every resident thread waited: only somebody outside this executor could end them.
  uint64_t outside_spins = 0;
  uint64_t threads = 0;
  uint64_t most_resident = 0;  // blocks on one device at a time
  double seconds = 0;          // inside run()
};

struct Grid {
  // Which GPU: device scope and occupancy go by it. One executor may run several; kernels of
  // several ranks may share one.
  int device = 0;
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  std::function<void()> body;  // what each thread calls
  std::function<void()> done;  // after the last thread, on the thread that steps; may launch
  // What the kernel comes after and before (timeline.h); none: the launching and the stepping OS
  // thread. Not owned.
  Timeline* timeline = nullptr;
};

// Why CUDA would refuse a launch of that shape (the limits of sm_80 to sm_100); empty if it would
// not.
std::string why_invalid(const Grid& grid);

// Not for two OS threads at a time.
class Executor {
 public:
  explicit Executor(const Options& options);
  ~Executor();  // grids that are not done are given up, without running their threads to their ends
  Executor(const Executor&) = delete;

  // Its blocks begin in a later step(). Grids run concurrently. A shape that is invalid is a
  // failure.
  void launch(Grid grid);

  // Runs up to that many thread switches. False: no grid is left. True also when it did nothing,
  // because another process has the GPU (after a pause).
  bool step(uint64_t max_switches);

  // Until no grid is left. Returns what happened since the last run().
  Stats run();

  // Since it was made, or the last run().
  const Stats& stats() const;

 private:
  std::unique_ptr<Engine> engine_;
};

}  // namespace pycoll::sim
