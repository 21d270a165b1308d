// Which accesses to memory are ordered, whatever the schedule: vector clocks (Fidge, Mattern), one
// entry a process, where a process is one lane of one rank. Programs synchronise through FIFOs with
// one lane at each end and through barriers, so the order found in one run holds for every run.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace pycoll::prover {

using Clock = std::vector<uint32_t>;
using ClockRef = std::shared_ptr<const Clock>;

// What is known when all of these are.
ClockRef latest(std::span<const ClockRef> clocks);

// One access: which process, at which of its times, in which of its steps.
struct Access {
  int32_t process = -1;
  uint32_t time = 0;
  int32_t step = 0;
};

// The accesses to one cell that a later one could conflict with.
struct CellHistory {
  Access write;
  std::vector<Access> reads;  // since that write
};

class HappensBefore {
 public:
  explicit HappensBefore(size_t processes) : clocks_(processes, Clock(processes, 0)) {}

  // Starts a step: what came before is in every snapshot of it, what comes after in none.
  void tick(int32_t process) { ++clock(process)[static_cast<size_t>(process)]; }

  ClockRef snapshot(int32_t process) const {
    return std::make_shared<const Clock>(clocks_[static_cast<size_t>(process)]);
  }

  // All that `other` knows happened before the process goes on. Null: an edge from nowhere.
  void join(int32_t process, const ClockRef& other);

  uint32_t time_of(int32_t process, int32_t seen_by) const {
    return clocks_[static_cast<size_t>(seen_by)][static_cast<size_t>(process)];
  }

  // Record an access in `step`; the answer is an earlier one that is not ordered before it.
  std::optional<Access> read(CellHistory& cell, int32_t process, int32_t step);
  std::optional<Access> write(CellHistory& cell, int32_t process, int32_t step);

 private:
  Clock& clock(int32_t process) { return clocks_[static_cast<size_t>(process)]; }
  bool is_before(const Access& earlier, int32_t process) const {
    return earlier.process < 0 || time_of(earlier.process, process) >= earlier.time;
  }
  Access access(int32_t process, int32_t step) const {
    return {process, time_of(process, process), step};
  }

  std::vector<Clock> clocks_;
};

// Proves the promise of the barrier collective: no rank leaves a round before it knows that every
// rank has entered it.
class Arrivals {
 public:
  Arrivals(std::span<const int32_t> lanes_of_rank, int32_t rounds);

  void enter(const HappensBefore& order, int32_t rank, int32_t process, int32_t round);

  // A lane's end of the round; the answer is a rank that this rank, all its lanes together, does
  // not know to have come. Asked at the last lane only.
  std::optional<int32_t> leave(const HappensBefore& order, int32_t rank, int32_t process,
                               int32_t round);

 private:
  struct RankRound {
    std::vector<Access> entries;  // one a lane
    Clock known;
    int32_t left = 0;
  };
  RankRound& at(int32_t rank, int32_t round) {
    return cells_[static_cast<size_t>(rank) * static_cast<size_t>(rounds_) +
                  static_cast<size_t>(round)];
  }

  std::vector<int32_t> lanes_of_rank_;
  int32_t rounds_;
  std::vector<RankRound> cells_;
};

}  // namespace pycoll::prover
