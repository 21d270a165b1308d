#include "torch/host_tensors.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "python/buffer.h"
#include "python/parse.h"
#include "python/spans.h"
#include "torch/tensors.h"

namespace py = pybind11;

namespace pycoll::torch_adapter {
namespace {

// Dense memory of the device that holds the values themselves, not those of something behind it.
bool is_plain_on(const at::Device& device, const at::Tensor& tensor) {
  return tensor.device() == device && tensor.layout() == at::kStrided && tensor.has_storage() &&
         is_plain(tensor);
}

// Fills the rows of plain tensors; the places of whatever else is on the list, which Python looks
// at (other classes, layouts, devices, dtypes).
std::vector<py::ssize_t> fill_spans(const py::list& values, const py::object& table,
                                    const std::vector<std::string>& dtypes,
                                    const at::Device& device) {
  const Buffer rows(table, true);
  if (rows.bytes() != values.size() * sizeof(Span)) {
    fail(ErrorKind::invalid_argument, "a table of ", rows.bytes(), " bytes for ", values.size(),
         " tensors");
  }
  std::vector<DType> taken;
  for (const std::string& name : dtypes) taken.push_back(parse_enum<DType>(name, "dtype"));
  std::vector<py::ssize_t> others;
  for (py::ssize_t i = 0; i < static_cast<py::ssize_t>(values.size()); ++i) {
    PyObject* value = PyList_GET_ITEM(values.ptr(), i);
    if (THPVariable_CheckExact(value)) {
      const at::Tensor& tensor = THPVariable_Unpack(value);
      const auto dtype = find_dtype(tensor.scalar_type());
      if (dtype && std::find(taken.begin(), taken.end(), *dtype) != taken.end() &&
          is_plain_on(device, tensor)) {
        const Span span{reinterpret_cast<uintptr_t>(tensor.data_ptr()),
                        static_cast<uint64_t>(tensor.numel()), static_cast<uint64_t>(*dtype)};
        std::memcpy(rows.data() + static_cast<size_t>(i) * sizeof(Span), &span, sizeof(Span));
        continue;
      }
    }
    others.push_back(i);
  }
  return others;
}

// Lets autograd complain where an old value was to be used in a backward pass. Tensors made in
// inference mode have no versions.
void mark_as_changed(const py::list& values) {
  for (const py::handle value : values) {
    if (!THPVariable_Check(value.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void bind_host_tensors(py::module_& module) {
  module.def("fill_spans", &fill_spans);
  module.def("mark_as_changed", &mark_as_changed);
}

}  // namespace pycoll::torch_adapter
