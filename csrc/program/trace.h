// A run on numbers, for `pycoll explain`: what every rank holds after each step of logical time,
// and who sent what to whom.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "program/program.h"

namespace pycoll {

struct TraceRow {
  uint32_t time;                            // 0: before anything was received
  std::vector<std::vector<double>> values;  // of each rank
};

struct Transfer {
  uint32_t time;
  int32_t from;
  int32_t to;
  int32_t chunk;
  int32_t lane;
  std::string text;  // the step of the rank that receives or reads
};

struct Trace {
  std::vector<TraceRow> rows;
  std::vector<Transfer> transfers;  // by time
};

// Runs one slice of every chunk. `inputs[r]` are rank r's elements: the same number everywhere,
// for reduce_scatter, scatter and all_to_all a multiple of world_size; a barrier ignores them, a
// scatter all but the root's.
//
// Time is the longest chain of hops so far: a message counts one, so does a barrier after its
// slowest member, so does a read of a peer's window. A rank's values are, for each chunk, the
// latest that one of its steps received or computed (also a partial sum that only went on in a
// message), before that its input, NaN where it has none: all_gather and gather show the vector of
// all ranks' parts, reduce_scatter and scatter the whole input, all_to_all the input, in which a
// rank's block takes the place of the block that goes to that rank.
//
// Ops: sum, avg, product, min, max. Throws Error(invalid_argument) for another op, for inputs of
// different lengths, and for Programs that the checker rejects.
Trace trace(std::span<const Program> programs, const std::vector<std::vector<double>>& inputs,
            ReduceOp op);

}  // namespace pycoll
