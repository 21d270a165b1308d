// The prover. It runs the Programs of all ranks on symbols and says whether they do what their
// collective promises: for this world size, for any data, in every schedule.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "program/program.h"

namespace pycoll {

enum class CheckKind {
  ok,
  invalid,       // no Program, or Programs of different things
  deadlock,      // some lanes wait for ever
  wrong_result,  // an output does not hold what the collective promises
  wrong_order,   // the right contributions, combined in another order than promised
  race,          // memory is read or overwritten without an order that makes it safe
  leftover,      // a message that nobody receives
  mismatch,      // sender and receiver disagree on what a message is
};

std::string_view name_of(CheckKind kind);

struct CheckOptions {
  int32_t depth = 2;     // slots of every FIFO
  int32_t rounds = 3;    // slices of the longest chunk; 3 reuse both buffers of a window
  bool in_place = true;  // input and output are one memory: the harder case, implies the other
  int32_t draws = 2;     // how often lengths are drawn, where blocks may differ
  uint64_t seed = 0;     // of those
};

struct CheckResult {
  CheckKind kind = CheckKind::ok;
  std::string message;  // names rank, lane and step; empty when ok

  bool ok() const { return kind == CheckKind::ok; }
};

// `programs[r]` is rank r's. Proved, for every slice:
//   * no deadlock with FIFOs of this depth, and no message left over;
//   * sender and receiver agree on wire, size and slice of every message;
//   * every output holds each rank's contribution exactly once (or exactly the data of the one rank
//     it belongs to), all ranks compute a result by the same tree of sums, in the promised order,
//     and it is divided and rounded exactly once;
//   * no cell is read before it is written, or overwritten while an unordered read may still come;
//   * no rank leaves a barrier before all have come.
// When there are several chunks and rounds, also for vectors whose last chunks are shorter, and
// where blocks may differ in length, also for lengths drawn at random, zero among them.
// Throws Error(invalid_argument) for depth or rounds below 1; everything else is in the result.
CheckResult check(std::span<const Program> programs, const CheckOptions& options = {});

}  // namespace pycoll
