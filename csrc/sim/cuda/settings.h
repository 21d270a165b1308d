// What the environment says about the simulated machine (sim/control.h lists it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pycoll::sim::cuda {

struct Settings {
  std::vector<int> devices;  // [ordinal]: which of the machine's
  size_t memory_bytes = size_t{8192} << 20;
  bool seeded = false;
  uint64_t seed = 1;
  unsigned resident = 0;
  std::string slice_file;  // empty: no time slices
  double timeout_s = 60;
  std::string faults;

  // Ends the process on values that make no sense: there is no caller yet to tell.
  static Settings from_env();
};

// Prints why, and ends the process with the exit code of failed simulations.
[[noreturn]] void give_up(const std::string& why);

}  // namespace pycoll::sim::cuda
