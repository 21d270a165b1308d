#include "torch/direct.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "python/op_names.h"
#include "torch/backend.h"

namespace py = pybind11;

namespace pycoll::torch_adapter {
namespace {

// One direct call: arguments as pycoll/direct.py documents them, looked at without pybind11, whose
// conversions cost more than a small collective. What is not plain goes to `general`, the Python
// function that asks torch.distributed. Holds the GIL, but while the collective runs.
class AllReduce {
 public:
  AllReduce(py::object world, py::object backend_of, py::object general)
      : world_(std::move(world)),
        backend_of_(std::move(backend_of)),
        general_(std::move(general)),
        default_pg_(interned("default_pg")),
        collected_(world_.attr("pg_coalesce_state").cast<py::dict>()) {}

  PyObject* call(PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    PyObject* given[kArguments] = {};
    if (!sort(args, count, keywords, given)) return general(args, count, keywords);
    const auto [tensor, op, group] = given;
    if (tensor == nullptr || !THPVariable_CheckExact(tensor)) {
      return general(args, count, keywords);
    }
    const auto reduce_op = op == nullptr ? ReduceOp::sum : op_names_.find(op);
    if (!reduce_op) return general(args, count, keywords);
    const auto backend = backend_for(group == nullptr ? Py_None : group);
    if (backend == nullptr) return general(args, count, keywords);
    const at::Tensor& plain = THPVariable_Unpack(tensor);
    if (torch_does_more(plain)) return general(args, count, keywords);
    const PlainTensors call{Collective::all_reduce, &plain, &plain,
                            c10d::kUnsetTimeout,    false,  *reduce_op};
    if (!backend->run_at_once(call)) return general(args, count, keywords);
    Py_RETURN_NONE;
  }

 private:
  static constexpr size_t kArguments = 3;  // tensor, op, group

  // Arguments by their place; false when there are others.
  bool sort(PyObject* const* args, Py_ssize_t count, PyObject* keywords, PyObject** given) const {
    if (count > static_cast<Py_ssize_t>(kArguments)) return false;
    std::copy(args, args + count, given);
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < named; ++i) {
      const auto name = std::find_if(names_.begin(), names_.end(), [&](const py::object& known) {
        return known.ptr() == PyTuple_GET_ITEM(keywords, i);
      });
      if (name == names_.end()) return false;
      PyObject*& place = given[name - names_.begin()];
      if (place != nullptr) return false;  // given twice
      place = args[count + i];
    }
    return true;
  }

  // What torch.distributed.all_reduce does not just hand on: modes are shown the call, a coalescing
  // block collects it, and complex numbers travel as pairs of real ones. Each rank finds its own
  // way (this group may be busy on one of them), so both ways must come to the same operation.
  bool torch_does_more(const at::Tensor& tensor) const {
    return tensor.is_complex() || PyDict_GET_SIZE(collected_.ptr()) != 0 ||
           at::impl::torch_function_mode_enabled() ||
           c10::impl::TorchDispatchModeTLS::any_modes_set();
  }

  PyObject* general(PyObject* const* args, Py_ssize_t count, PyObject* keywords) const {
    return PyObject_Vectorcall(general_.ptr(), args, static_cast<size_t>(count), keywords);
  }

  // The group's pycoll backend for CPU tensors; nullptr when it has none, which `general` explains.
  c10::intrusive_ptr<Backend> backend_for(PyObject* group) {
    py::object world;
    if (group == Py_None) {
      world = py::reinterpret_steal<py::object>(PyObject_GetAttr(world_.ptr(), default_pg_.ptr()));
      if (!world) throw py::error_already_set();
      group = world.ptr();
    }
    if (group == Py_None) return nullptr;
    // A group may be gone and another be at its address: the weak reference tells.
    if (known_ && PyWeakref_GetObject(known_.ptr()) == group) return backend_->lock();
    const py::object found = backend_of_(py::handle(group));
    if (found.is_none()) return nullptr;
    auto backend = found.cast<c10::intrusive_ptr<Backend>>();
    auto known = py::reinterpret_steal<py::object>(PyWeakref_NewRef(group, nullptr));
    if (!known) throw py::error_already_set();
    // Together, after all that may run other Python threads: they belong to each other.
    backend_.emplace(backend);
    std::swap(known_, known);
    return backend;
  }

  static py::object interned(const char* name) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
  }

  const OpNames op_names_;
  const std::array<py::object, kArguments> names_{interned("tensor"), interned("op"),
                                                  interned("group")};
  const py::object world_;       // torch's own record of the default group
  const py::object backend_of_;  // group -> Backend or None
  const py::object general_;
  const py::object default_pg_;
  const py::dict collected_;  // torch's own record of groups in a coalescing block
  py::object known_;          // weak reference to the group that was asked for last
  std::optional<c10::weak_intrusive_ptr<Backend>> backend_;
};

constexpr auto kCapsule = "pycoll.Method";

// What Python's function objects point to must live as long as they do: they hold the capsule.
struct Method {
  AllReduce call;
  std::string doc;
  PyMethodDef definition;
};

PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  HANDLE_TH_ERRORS
  auto* method = static_cast<Method*>(PyCapsule_GetPointer(self, kCapsule));
  return method->call.call(args, count, keywords);
  END_HANDLE_TH_ERRORS
}

py::object make_all_reduce(py::object world, py::object backend_of, py::object general) {
  std::string doc =
      "all_reduce($module, tensor, op='sum', group=None, async_op=False, *, codec=None, "
      "step=None, residual=None, sum_residual=None)\n--\n\n" +
      general.attr("__doc__").cast<std::string>();
  const auto function = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce));
  auto method = std::make_unique<Method>(
      Method{{std::move(world), std::move(backend_of), std::move(general)}, std::move(doc), {}});
  method->definition = {"all_reduce", function, METH_FASTCALL | METH_KEYWORDS, method->doc.c_str()};
  PyMethodDef* definition = &method->definition;
  const py::capsule state(method.release(), kCapsule, [](PyObject* capsule) {
    delete static_cast<Method*>(PyCapsule_GetPointer(capsule, kCapsule));
  });
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(definition, state.ptr(), nullptr));
}

}  // namespace

void bind_direct_calls(py::module_& module) {
  module.def("make_all_reduce", &make_all_reduce);
}

}  // namespace pycoll::torch_adapter
