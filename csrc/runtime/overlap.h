// What a call's vectors must look like before memory is touched.
#pragma once

#include "runtime/operation.h"

namespace pycoll {

// Throws Error(invalid_argument) when the blocks are not those of the collective (program.h): one,
// or one a rank, or none where this rank takes no part in it; or when their lengths do not fit each
// other. The executor trusts them.
void check_shapes(const CallRequest& request, int rank, int world_size);

// Throws Error(invalid_argument) when outputs share memory with each other, or an output with an
// input other than exactly in place (all_reduce, broadcast and reduce: input and output are the
// same vector; all_gather and gather: the input is this rank's block of the output; reduce_scatter
// and scatter: the output is this rank's block of the input; all_to_all: never). Programs read
// inputs after they have written outputs, so anything else would compute wrong numbers.
void check_overlaps(const CallRequest& request, int rank);

// The memory of a call that passed check_overlaps().
struct Touched {
  VectorView input;
  VectorView output;
  size_t element;  // bytes
};

// Whether one of two calls writes what the other reads or writes: then they must run one after the
// other.
bool in_conflict(const Touched& one, const Touched& other);

}  // namespace pycoll
