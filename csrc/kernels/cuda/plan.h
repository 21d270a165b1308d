// What launchers share: how calls are cut.
#pragma once

#include "kernels/cuda/executor_arguments.h"

namespace pycoll::cuda {

struct ProgramCut {
  ProgramPlan plan;
  CutVector input;
  CutVector output;
  uint64_t scratch_stride = 0;
};
ProgramCut cut_program(const Geometry& geometry, const ProgramCall& call);

}  // namespace pycoll::cuda
