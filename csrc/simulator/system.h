// The Programs of all simulated ranks, compiled for the engine: FIFOs and barriers looked up,
// lengths and prices in tables, a few bytes a step.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "program/program.h"
#include "simulator/cost.h"
#include "simulator/symmetry.h"

namespace pycoll::simulator {

struct CompiledStep {
  int32_t in = -1;   // FIFO that it receives from; of a barrier, its number
  int32_t out = -1;  // FIFO that it sends to
  uint16_t price = 0;
  uint16_t length = 0;
};

// A lane of a rank, in one of its flights (Executor::flights_of in runtime/executor.cpp).
struct Process {
  int32_t rank = 0;
  int32_t flight = 0;  // it runs rounds flight, flight + flights, ...
  uint64_t first = 0;  // of its steps
  uint64_t count = 0;
};

struct FifoEnds {
  int32_t sender = -1;    // process
  int32_t receiver = -1;  // process
  bool network = false;
  uint32_t order = 0;  // among those that one host receives from: breaks ties alike on every host
};

struct System {
  std::vector<int32_t> first_process;  // of each rank, and one more
  std::vector<int32_t> host;           // of each rank
  std::vector<Process> processes;
  std::vector<CompiledStep> steps;
  std::vector<FifoEnds> fifos;
  std::vector<std::vector<int32_t>> barriers;  // processes
  std::vector<Price> prices;
  std::vector<bool> is_barrier;   // of each price
  std::vector<uint64_t> lengths;  // elements of a whole chunk
  int32_t hosts = 1;
  uint64_t slice = 1;  // elements
  uint64_t rounds = 1;
  int32_t flights = 1;  // rounds that are under way at a time
};

// Adds the Programs of the ranks that are simulated, 0 first, one after the other; each may be
// dropped afterwards.
class Compiler {
 public:
  // `hosts`: of every rank, also of those that symmetry spares.
  Compiler(const Machine& machine, const CallShape& call, const Symmetry& symmetry,
           const std::vector<int32_t>& hosts, int32_t flights)
      : machine_(machine), call_(call), symmetry_(symmetry), hosts_(hosts) {
    system_.flights = flights;
  }

  // `length_of(step)`: elements of the whole chunk that a step works on.
  template <typename LengthOf>
  void add(const Program& program, const LengthOf& length_of) {
    begin_rank(program);
    for (int32_t flight = 0; flight < system_.flights; ++flight) {
      for (size_t lane = 0; lane < program.lanes.size(); ++lane) {
        begin_lane(program, flight);
        for (const Step& step : program.lanes[lane].steps) {
          add_step(program, static_cast<int32_t>(lane), step, length_of(step));
        }
      }
    }
  }

  // Throws Error(invalid_argument) when an end of a FIFO is missing.
  System finish(uint64_t slice, uint64_t rounds);

 private:
  struct Ends {
    int32_t from;
    int32_t to;
    int32_t channel;
    bool operator==(const Ends&) const = default;
  };

  void begin_rank(const Program& program);
  void begin_lane(const Program& program, int32_t flight);
  void add_step(const Program& program, int32_t lane, const Step& step, uint64_t length);
  int32_t fifo(Ends ends);
  uint16_t intern_price(const Price& price, bool barrier);
  int32_t barrier(int32_t lane, const std::vector<int32_t>& group);

  const Machine& machine_;
  const CallShape& call_;
  const Symmetry& symmetry_;
  const std::vector<int32_t>& hosts_;
  System system_;
  std::unordered_map<uint64_t, int32_t> fifos_;
  std::map<std::pair<int32_t, std::vector<int32_t>>, int32_t> barriers_;
  std::vector<std::pair<int32_t, std::vector<int32_t>>> groups_;  // of each barrier: lane, ranks
};

}  // namespace pycoll::simulator
