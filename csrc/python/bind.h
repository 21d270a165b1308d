// The parts of the `_core` module, one file each.
#pragma once

#include <pybind11/pybind11.h>

namespace pycoll {

// First: the others may throw pycoll::Error already while they register.
void bind_errors(pybind11::module_& module);
void bind_program(pybind11::module_& module);
void bind_simulator(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_codec(pybind11::module_& module);
void bind_fused(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);
void bind_flight_words(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_arena(pybind11::module_& module);

}  // namespace pycoll
