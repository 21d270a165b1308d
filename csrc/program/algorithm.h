// The table of algorithms. A new algorithm is one file and one row in registry.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "program/program.h"

namespace pycoll {

// What a builder may look at: the same on every rank but for `rank`.
struct ProgramRequest {
  Collective collective = Collective::barrier;
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t root = 0;
  // The host of each rank, numbered by first appearance (0, 0, 1, 0, 2, ...); empty: all on one.
  std::vector<int32_t> hosts;
};

struct Algorithm {
  Collective collective;
  std::string_view name;
  std::string_view summary;  // one line for `pycoll explain` and the docs
  bool needs_window;         // direct steps: all ranks must share memory
  int32_t min_depth;  // FIFO slots without which it deadlocks (1 or 2; the checker proves it)
  // Called through build_program only, which fills in who the Program is for, and for one rank
  // never asks a builder: world_size is at least 2 here.
  Program (*build)(const ProgramRequest&);
  // Works on peers' vectors in place (Program::needs_lease): where a rank's are not in shareable
  // memory, another algorithm runs the call.
  bool needs_lease = false;
};

// All rows, grouped by collective, in the order they are documented.
std::span<const Algorithm> algorithms();

// nullptr when there is no such row.
const Algorithm* find_algorithm(Collective collective, std::string_view name);

// "one_shot, two_shot, ring, ...": for messages.
std::string algorithm_names(Collective collective);

// Builds and validates. Throws Error(invalid_argument) with the names that exist.
Program build_program(std::string_view algorithm, const ProgramRequest& request);

}  // namespace pycoll
