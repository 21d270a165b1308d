// What a step costs on a machine.
#pragma once

#include <cstdint>

#include "program/program.h"
#include "simulator/machine.h"

namespace pycoll::simulator {

// What the price of a step depends on, besides the step.
struct CallShape {
  uint32_t element_bytes = 4;  // of a value
  uint32_t acc_bytes = 4;      // of a partial sum
  double vector_bytes = 0;     // that all ranks of a host hold, input and output
};

// Where a step's messages go, and whom it looks at.
struct StepRoute {
  bool network_in = false;
  bool network_out = false;
  int32_t members = 0;  // of its group
};

// CPU time of a step: `fixed`, and so much for each element of its slice. Of that, `memory` is
// spent on the host's memory, which its ranks share.
struct Price {
  double fixed = 0;
  double element = 0;
  double memory = 0;
  uint32_t bytes_out = 0;  // an element of the message that is sent
  bool operator==(const Price&) const = default;
};

Price price_of(const Step& step, const StepRoute& route, const Machine& machine,
               const CallShape& call);

}  // namespace pycoll::simulator
