#include "bind.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The core of pycoll without torch: Programs, checker, kernels, communicator.";
  pycoll::bind_errors(module);
  pycoll::bind_program(module);
  pycoll::bind_simulator(module);
  pycoll::bind_kernels(module);
  pycoll::bind_codec(module);
  pycoll::bind_fused(module);
  pycoll::bind_device(module);  // before what returns its types
  pycoll::bind_communicator(module);
  pycoll::bind_arena(module);
  pycoll::bind_flight_words(module);
}
