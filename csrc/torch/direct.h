// pycoll's own calls on tensors, without torch.distributed's Python layers in between.
#pragma once

#include <pybind11/pybind11.h>

namespace pycoll::torch_adapter {

// Adds what pycoll/direct.py needs to the module.
void bind_direct_calls(pybind11::module_& module);

}  // namespace pycoll::torch_adapter
