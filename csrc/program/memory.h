// The memory of all ranks while Programs are interpreted: what every cell holds, and the accesses
// that a later one could conflict with. A cell is one slice of one chunk.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "program/happens_before.h"
#include "program/wiring.h"

namespace pycoll::prover {

// How a value is represented, and what may be done with it.
enum class Form : uint8_t {
  none,      // nothing was stored here
  raw,       // a rank's own elements
  partial,   // an accumulator
  finished,  // divided and rounded: part of no sum any more
};

template <typename Value>
struct Datum {
  Value value{};
  Form form = Form::none;
};

template <typename Value>
struct Cell {
  Datum<Value> datum;
  int32_t round = -1;  // when it was written; -1: never
  uint32_t time = 0;
  int32_t process = -1;  // who wrote it, in which step
  int32_t step = -1;
  int32_t length = 0;  // length class of what was written
};

// A cell's address. `input` has no cells: it is read only, and in place it is `output`.
struct Place {
  int32_t rank;
  int32_t lane;
  int32_t round;
  Ref ref;
};

template <typename Value>
class Memory {
 public:
  Memory(std::span<const Program> programs, int32_t rounds, bool in_place) {
    for (const Program& program : programs) {
      RankMemory& memory = ranks_.emplace_back();
      const size_t lanes = program.lanes.size();
      const bool shares = lanes_share_chunks(program, in_place);
      const bool lends = program.lends_input || program.lends_output;
      needs_order_ = needs_order_ || shares || lends || program.uses_window();
      memory.output_chunks = static_cast<size_t>(program.output_chunks);
      memory.acc_chunks = static_cast<size_t>(program.acc_chunks);
      memory.window_chunks = static_cast<size_t>(program.window_chunks);
      memory.outputs.resize(memory.output_chunks * static_cast<size_t>(rounds));
      memory.accs.resize(lanes * memory.acc_chunks);
      memory.windows.resize(lanes * kBuffers * memory.window_chunks);
      memory.window_history.resize(memory.windows.size());
      if (shares || lends) memory.output_history.resize(memory.outputs.size());
    }
  }

  // Is any memory touched by two processes?
  bool needs_order() const { return needs_order_; }

  Cell<Value>& at(const Place& place) {
    RankMemory& memory = ranks_[static_cast<size_t>(place.rank)];
    if (place.ref.space == Space::output) return memory.outputs[output_index(memory, place)];
    if (place.ref.space == Space::window) return memory.windows[window_index(memory, place)];
    return memory.accs[static_cast<size_t>(place.lane) * memory.acc_chunks +
                       static_cast<size_t>(place.ref.chunk)];
  }

  // nullptr: only one process can touch the cell.
  CellHistory* history(const Place& place) {
    RankMemory& memory = ranks_[static_cast<size_t>(place.rank)];
    if (place.ref.space == Space::window)
      return &memory.window_history[window_index(memory, place)];
    if (place.ref.space != Space::output || memory.output_history.empty()) return nullptr;
    return &memory.output_history[output_index(memory, place)];
  }

 private:
  static constexpr size_t kBuffers = 2;  // of the window, used by alternating rounds

  struct RankMemory {
    size_t output_chunks = 0;
    size_t acc_chunks = 0;
    size_t window_chunks = 0;
    std::vector<Cell<Value>> outputs;  // of every round: they are different elements
    std::vector<Cell<Value>> accs;
    std::vector<Cell<Value>> windows;
    std::vector<CellHistory> output_history;
    std::vector<CellHistory> window_history;
  };

  static size_t output_index(const RankMemory& memory, const Place& place) {
    return static_cast<size_t>(place.round) * memory.output_chunks +
           static_cast<size_t>(place.ref.chunk);
  }
  static size_t window_index(const RankMemory& memory, const Place& place) {
    const size_t buffer = static_cast<size_t>(place.round) % kBuffers;
    return (static_cast<size_t>(place.lane) * kBuffers + buffer) * memory.window_chunks +
           static_cast<size_t>(place.ref.chunk);
  }

  std::vector<RankMemory> ranks_;
  bool needs_order_ = false;
};

}  // namespace pycoll::prover
