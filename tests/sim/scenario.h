// A named run of kernels on the executor. Those of value_ and schedule_scenarios.cpp check what
// they compute; those of order_ and fault_scenarios.cpp are for what a sanitizer or the executor
// itself has to say.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sim/simt.h"

namespace pycoll::sim::tests {

struct Settings {
  uint64_t seed = 0;          // 0: round robin
  unsigned max_resident = 0;  // blocks on a device at a time; 0: any number

  Options options() const {
    Options options;
    options.policy = seed == 0 ? Policy::round_robin : Policy::random;
    options.seed = seed;
    options.max_resident = max_resident;
    return options;
  }
};

struct Scenario {
  std::string name;
  std::string summary;
  std::function<void(const Settings&)> run;  // throws if something is wrong
};

std::vector<Scenario> value_scenarios();
std::vector<Scenario> order_scenarios();
std::vector<Scenario> fault_scenarios();
std::vector<Scenario> schedule_scenarios();

inline void check(bool held, const std::string& what) {
  if (!held) throw std::runtime_error(what);
}

template <class T>
void check_equal(const T& got, const T& expected, const std::string& what) {
  check(got == expected,
        what + ": " + std::to_string(got) + ", expected " + std::to_string(expected));
}

// Runs grids that are all there from the start, on one executor.
inline Stats run_grids(const Options& options, std::vector<Grid> grids) {
  Executor executor(options);
  for (Grid& grid : grids) executor.launch(std::move(grid));
  return executor.run();
}

inline Grid grid_of(int device, dim3 blocks, dim3 threads, std::function<void()> body,
                    size_t shared_bytes = 0) {
  Grid grid;
  grid.device = device;
  grid.grid = blocks;
  grid.block = threads;
  grid.shared_bytes = shared_bytes;
  grid.body = std::move(body);
  return grid;
}

}  // namespace pycoll::sim::tests
