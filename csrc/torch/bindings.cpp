// The Python face of the torch module: create_backend() for pycoll/_registration.py.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/backend.h"

namespace py = pybind11;

namespace pycoll::torch_adapter {
namespace {

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

c10::intrusive_ptr<Backend> create_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int world_size, std::chrono::milliseconds timeout,
                                           const std::string& group_id,
                                           const std::vector<uint64_t>& global_ranks,
                                           const py::object& /*options*/) {
  const GroupRequest request{store,    rank,         world_size,   timeout,
                             group_id, global_ranks, check_signals};
  return c10::make_intrusive<Backend>(request);
}

}  // namespace

PYBIND11_MODULE(PYCOLL_MODULE, m) {
  m.doc() = "pycoll as a torch.distributed backend, for the torch it was built with.";
  // torch._C._distributed_c10d registers the base class: it must be there first.
  py::module_::import("torch.distributed");

  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("get_sequence_number", &Backend::getSequenceNumberForGroup);
  m.def("create_backend", &create_backend);
}

}  // namespace pycoll::torch_adapter
