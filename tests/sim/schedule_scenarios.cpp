// Schedules, occupancy and time slices.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "device/device.cuh"
#include "scenario.h"
#include "sim/time_slice.h"

namespace pycoll::sim::tests {
namespace {

using namespace pycoll::device;

// Who came when to a counter that all threads increment several times.
std::vector<int> trace(const Options& options, int devices) {
  std::vector<int> order;
  std::vector<Grid> grids;
  uint32_t counter = 0;
  for (int device = 0; device < devices; ++device) {
    grids.push_back(grid_of(device, dim3(2), dim3(4), [&, device] {
      for (int i = 0; i < 20; ++i) {
        fetch_add_relaxed<Scope::system>(&counter, 1);
        order.push_back(device * 8 + static_cast<int>(blockIdx.x * 4 + threadIdx.x));
        if (i % 7 == 3) __syncthreads();
      }
    }));
  }
  run_grids(options, std::move(grids));
  return order;
}

// Prints the order, for who runs this several times.
void print_trace(const Settings& settings) {
  uint64_t hash = 0;
  for (const int each : trace(settings.options(), 3))
    hash = hash * 31 + static_cast<uint64_t>(each);
  std::printf("trace %llx\n", static_cast<unsigned long long>(hash));
}

void seeds(const Settings& settings) {
  Options options = settings.options();
  options.policy = Policy::random;
  std::vector<std::vector<int>> traces;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    options.seed = seed;
    traces.push_back(trace(options, 3));
    check(trace(options, 3) == traces.back(), "the same seed, another schedule");
  }
  std::sort(traces.begin(), traces.end());
  check(std::unique(traces.begin(), traces.end()) == traces.end(), "two seeds, one schedule");
}

// How far one device gets ahead of the other, in increments of its threads.
int lead(unsigned sticky) {
  Options options;
  options.policy = Policy::random;
  options.sticky = sticky;
  int most = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    options.seed = seed;
    int ahead = 0;
    for (const int each : trace(options, 2)) {
      ahead += each < 8 ? 1 : -1;
      most = std::max(most, std::abs(ahead));
    }
  }
  return most;
}

void skew(const Settings&) {
  const int even = lead(1), drifting = lead(256);
  check(drifting > 2 * even,
        "led by " + std::to_string(drifting) + " at most, by " + std::to_string(even) + " without");
}

void occupancy(const Settings& settings) {
  for (const unsigned room : {1u, 2u, 3u, 0u}) {
    Options options = settings.options();
    options.max_resident = room;
    int running[2] = {}, most = 0;
    std::vector<Grid> grids;
    for (int k = 0; k < 4; ++k) {  // two on each device
      grids.push_back(grid_of(k % 2, dim3(3), dim3(2), [&, k] {
        int& here = running[k % 2];
        if (threadIdx.x == 0) most = std::max(most, ++here);
        __syncthreads();
        if (threadIdx.x == 0) --here;
      }));
    }
    const Stats stats = run_grids(options, std::move(grids));
    const unsigned allowed = room == 0 ? 6 : room;
    check(most >= 1 && most <= static_cast<int>(allowed),
          "blocks at a time: " + std::to_string(most));
    check_equal<uint64_t>(stats.most_resident, allowed, "most resident");
    check_equal<uint64_t>(stats.threads, 4 * 3 * 2, "threads");
  }
}

// One change at a time: a runtime may do other work in between.
void steps(const Settings& settings) {
  Executor executor(settings.options());
  check(!executor.step(10), "an executor without grids has work");
  int sum = 0;
  bool done = false;
  Grid grid = grid_of(0, dim3(2), dim3(3), [&] {
    __syncthreads();
    ++sum;
  });
  grid.done = [&] { done = true; };
  executor.launch(std::move(grid));
  int count = 0;
  while (executor.step(1)) {
    check(!done, "it is done and goes on");
    check(++count < 1000, "it does not end");
  }
  check(done && sum == 6 && count > 6, "it ended early");
  check_equal<uint64_t>(executor.stats().outside_spins, 0, "spins that only others can end");
}

void failure_handler(const Settings& settings) {
  Options options = settings.options();
  options.on_failure = [](const std::string& report) {
    std::printf("handler: %s", report.c_str());
  };
  run_grids(options, {grid_of(0, dim3(1), dim3(2), [] {
              if (threadIdx.x == 0) __syncthreads();
            })});
}

// ---- Time slices: each process of a pair does the same. ----

struct SharedByProcesses {
  std::atomic<int> inside[2];  // how many blocks of the process are running
  std::atomic<int> together;   // times that both had some
  std::atomic<int> turns;      // times that the process changed
  std::atomic<int> last;
  uint32_t flags[2];
};

struct Pair {
  Pair() {
    void* const memory = ::mmap(nullptr, sizeof(SharedByProcesses), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    shared = new (memory) SharedByProcesses{};
    char name[] = "/tmp/pycoll-slice-XXXXXX";
    const int fd = ::mkstemp(name);
    check(fd >= 0, "mkstemp");
    ::close(fd);
    path = name;
  }
  ~Pair() {
    ::unlink(path.c_str());
    ::munmap(shared, sizeof(SharedByProcesses));
  }

  // Runs body(executor options, number) in two processes.
  void run(const Settings& settings, const std::function<void(const Options&, int)>& body) {
    pid_t children[2];
    for (int number = 0; number < 2; ++number) {
      children[number] = ::fork();
      if (children[number] != 0) continue;
      {
        TimeSlice slice(path, 0.001);
        Options options = settings.options();
        options.external = true;
        options.timeout_s = 20;
        options.time_slice = &slice;
        body(options, number);
      }
      ::_exit(0);
    }
    for (const pid_t child : children) {
      int status = 0;
      ::waitpid(child, &status, 0);
      check_equal(status, 0, "a process ended with");
    }
  }

  SharedByProcesses* shared;
  std::string path;
};

// Kernels that are long enough for the slices of both to be used up several times.
void sliced(const Settings& settings) {
  constexpr int kTurns = 6;
  constexpr uint64_t kPatienceNs = 15'000'000'000;
  Pair pair;
  SharedByProcesses& shared = *pair.shared;
  pair.run(settings, [&](const Options& options, int number) {
    run_grids(options, {grid_of(0, dim3(2), dim3(4), [&] {
                PYCOLL_SHARED(bool, more, 1);
                const uint64_t began = timer_ns();
                do {
                  ++shared.inside[number];
                  if (shared.inside[1 - number] != 0) ++shared.together;
                  if (shared.last.exchange(number) != number) ++shared.turns;
                  --shared.inside[number];
                  __syncthreads();
                  if (threadIdx.x == 0) {
                    more[0] = shared.turns < kTurns && timer_ns() - began < kPatienceNs;
                  }
                  __syncthreads();
                } while (more[0]);
              })});
  });
  check_equal(shared.together.load(), 0, "both processes at once");
  check(shared.turns >= kTurns, "turns: " + std::to_string(shared.turns.load()));
  check_equal<uint64_t>(TimeSlice(pair.path).spins_across_processes(), 0, "spins");
}

// What ranks that share a GPU must not do: each waits for the other's flag.
void sliced_spins(const Settings& settings) {
  Pair pair;
  SharedByProcesses& shared = *pair.shared;
  pair.run(settings, [&](const Options& options, int number) {
    const Stats stats =
        run_grids(options, {grid_of(0, dim3(1), dim3(4), [&] {
                    if (threadIdx.x == 0) {
                      store_release<Scope::system>(&shared.flags[number], 1);
                    }
                    while (load_acquire<Scope::system>(&shared.flags[1 - number]) == 0) {
                      spin_pause();
                    }
                  })});
    if (stats.outside_spins != 0) ++shared.turns;
  });
  check(shared.turns >= 1, "no process has noticed");
  check(TimeSlice(pair.path).spins_across_processes() > 0, "none was counted");
}

// Waiting for one's own blocks is nobody else's.
void sliced_spins_inside(const Settings& settings) {
  Pair pair;
  pair.run(settings, [&](const Options& options, int) {
    uint32_t arrived = 0;
    run_grids(options, {grid_of(0, dim3(3), dim3(2), [&] {
                for (uint32_t round = 1; round <= 50; ++round) {
                  if (threadIdx.x == 0) {
                    fetch_add_acq_rel<Scope::device>(&arrived, 1);
                    while (load_acquire<Scope::device>(&arrived) < 3 * round) spin_pause();
                  }
                  __syncthreads();
                }
              })});
  });
  check_equal<uint64_t>(TimeSlice(pair.path).spins_across_processes(), 0, "spins");
}

}  // namespace

std::vector<Scenario> schedule_scenarios() {
  return {
      {"schedule/trace", "prints a number for the order of everything", print_trace},
      {"schedule/seeds", "20 seeds, 20 schedules, each the same again", seeds},
      {"schedule/skew", "favourites let one device run ahead", skew},
      {"schedule/occupancy", "no more blocks at a time than there is room for", occupancy},
      {"schedule/steps", "one switch at a time", steps},
      {"schedule/failure_handler", "the report goes to the caller's handler", failure_handler},
      {"slice/alternate", "two processes on a GPU, never at once", sliced},
      {"slice/spins", "kernels of two processes wait for one another", sliced_spins},
      {"slice/spins_inside", "kernels wait for their own blocks", sliced_spins_inside},
  };
}

}  // namespace pycoll::sim::tests
