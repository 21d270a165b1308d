#include "torch/direct.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "torch/backend.h"

namespace py = pybind11;

namespace pycoll::torch_adapter {
namespace {

// What the caller wrote in `op`. Names in Python code are one object each, so most often a
// comparison of addresses tells.
class OpNames {
 public:
  OpNames() {
    for (size_t i = 0; i < names_.size(); ++i) {
      names_[i] = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(kRows[i].name));
    }
  }
  std::optional<ReduceOp> find(PyObject* name) const {
    for (size_t i = 0; i < names_.size(); ++i) {
      if (names_[i].ptr() == name) return kRows[i].op;
    }
    return std::nullopt;
  }

 private:
  struct Row {
    const char* name;
    ReduceOp op;
  };
  static constexpr Row kRows[] = {
      {"sum", ReduceOp::sum}, {"avg", ReduceOp::avg},   {"product", ReduceOp::product},
      {"min", ReduceOp::min}, {"max", ReduceOp::max},   {"band", ReduceOp::band},
      {"bor", ReduceOp::bor}, {"bxor", ReduceOp::bxor},
  };
  std::array<py::object, std::size(kRows)> names_;
};

// One direct call: arguments as pycoll/direct.py documents them, looked at without pybind11, whose
// conversions cost more than a small collective. What is not plain goes to `general`, the Python
// function that asks torch.distributed. Holds the GIL, but while the collective runs.
class AllReduce {
 public:
  AllReduce(py::object world, py::object backend_of, py::object general)
      : world_(std::move(world)),
        backend_of_(std::move(backend_of)),
        general_(std::move(general)),
        default_pg_(py::reinterpret_steal<py::object>(PyUnicode_InternFromString("default_pg"))) {}

  PyObject* call(PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
    PyObject* op = nullptr;
    PyObject* group = Py_None;
    const bool simple = keywords == nullptr && count >= 1 && count <= 3;
    if (simple && count >= 2) op = args[1];
    if (simple && count == 3) group = args[2];
    if (!simple || !THPVariable_CheckExact(args[0])) return general(args, count, keywords);
    const auto reduce_op = op == nullptr ? ReduceOp::sum : op_names_.find(op);
    if (!reduce_op) return general(args, count, keywords);
    const auto backend = backend_for(group);
    if (backend == nullptr) return general(args, count, keywords);
    const at::Tensor& tensor = THPVariable_Unpack(args[0]);
    const PlainTensors call{Collective::all_reduce, &tensor, &tensor,
                            c10d::kUnsetTimeout,    false,   *reduce_op};
    if (!backend->run_at_once(call)) return general(args, count, keywords);
    Py_RETURN_NONE;
  }

 private:
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
    backend_.emplace(backend);
    known_ = py::reinterpret_steal<py::object>(PyWeakref_NewRef(group, nullptr));
    if (!known_) throw py::error_already_set();
    return backend;
  }

  const OpNames op_names_;
  const py::object world_;       // torch's own record of the default group
  const py::object backend_of_;  // group -> Backend or None
  const py::object general_;
  const py::object default_pg_;
  py::object known_;  // weak reference to the group that was asked for last
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
  std::string doc = "all_reduce($module, tensor, op='sum', group=None, async_op=False)\n--\n\n" +
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
