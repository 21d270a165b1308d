// pycoll::Error as Python exceptions: one class a kind, all of them pycoll.Error, and each also the
// builtin class that a caller who does not know pycoll would catch.
#include <pybind11/gil_safe_call_once.h>

#include <array>
#include <string_view>

#include "bind.h"
#include "core/error.h"

namespace py = pybind11;

namespace pycoll {
namespace {

struct ErrorClass {
  ErrorKind kind;
  const char* name;
  PyObject** builtin;  // the second base
  const char* doc;
};

constexpr size_t kKinds = 7;

std::array<ErrorClass, kKinds> error_classes() {
  return {{
      {ErrorKind::invalid_argument, "InvalidArgumentError", &PyExc_ValueError,
       "The caller's fault, found before memory was touched."},
      {ErrorKind::mismatch, "MismatchError", nullptr, "The ranks called different things."},
      {ErrorKind::peer_failed, "PeerError", nullptr, "Another process died or left."},
      {ErrorKind::timed_out, "TimeoutError", &PyExc_TimeoutError, "A deadline passed."},
      {ErrorKind::aborted, "AbortedError", nullptr, "This group was aborted, here or by a peer."},
      {ErrorKind::not_implemented, "UnsupportedError", &PyExc_NotImplementedError,
       "Known, but not in pycoll yet."},
      {ErrorKind::system, "OperatingSystemError", &PyExc_OSError,
       "The operating system refused something."},
  }};
}

using Classes = std::array<py::object, kKinds>;

// Exception classes have to be reachable from a translator, which is a plain function; they hold
// no state of pycoll's own. Never destroyed: the interpreter may be gone by then.
PYBIND11_CONSTINIT py::gil_safe_call_once_and_store<Classes> classes_storage;

py::object new_class(py::module_& module, const char* name, const char* doc, py::tuple bases) {
  const std::string qualified = concat(PyModule_GetName(module.ptr()), ".", name);
  PyObject* made = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  py::object result = py::reinterpret_steal<py::object>(made);
  module.attr(name) = result;
  return result;
}

Classes make_classes(py::module_& module) {
  const py::object base =
      new_class(module, "Error", "Base class of all errors of pycoll.",
                py::make_tuple(py::reinterpret_borrow<py::object>(PyExc_RuntimeError)));
  Classes classes;
  for (const ErrorClass& row : error_classes()) {
    py::list bases;
    bases.append(base);
    if (row.builtin != nullptr) bases.append(py::handle(*row.builtin));
    classes[static_cast<size_t>(row.kind)] = new_class(module, row.name, row.doc, py::tuple(bases));
  }
  return classes;
}

void translate(std::exception_ptr pointer) {
  if (!pointer) return;
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const py::object& type = classes_storage.get_stored()[static_cast<size_t>(error.kind())];
    // A peer's text may be cut anywhere, also in the middle of a character.
    const std::string_view text = error.what();
    const auto decoded = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
    py::set_error(type, decoded);
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  classes_storage.call_once_and_store_result([&] { return make_classes(module); });
  py::register_local_exception_translator(translate);
}

}  // namespace pycoll
