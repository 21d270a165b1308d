// Lists of tensors for pycoll's kernels.
#pragma once

#include <pybind11/pybind11.h>

namespace pycoll::torch_adapter {

// Adds what pycoll/_host_arrays.py needs to the module.
void bind_host_tensors(pybind11::module_& module);

}  // namespace pycoll::torch_adapter
