// Which of a call's blocks may share memory.
#pragma once

#include "runtime/operation.h"

namespace pycoll {

// Throws Error(invalid_argument) when outputs share memory with each other, or an output with an
// input other than exactly in place (all_reduce and broadcast: input and output are the same
// vector; all_gather: the input is this rank's block of the output; reduce_scatter: the output is
// this rank's block of the input). Programs read inputs after they have written outputs, so
// anything else would compute wrong numbers.
void check_overlaps(const CallRequest& request, int rank);

}  // namespace pycoll
