#include "torch/regions.h"

#include "python/gil.h"
#include "python/parse.h"

namespace py = pybind11;

namespace pycoll::torch_adapter {

CodecChoice choice_of(const CodecFields& fields) {
  const auto& [kind, block, stochastic, seed, step] = fields;
  const Codec codec{parse_enum<CodecKind>(kind, "codec"), block, stochastic};
  check_codec(codec);
  return {codec, seed, step};
}

std::optional<CodecWord> Regions::here() const {
  if (!any() || python_is_ending()) return std::nullopt;
  const py::gil_scoped_acquire gil;
  PyObject* found = nullptr;
  if (PyContextVar_Get(variable_.ptr(), nullptr, &found) != 0) throw py::error_already_set();
  auto region = py::reinterpret_steal<py::object>(found);
  while (!region.is_none() && !region.attr("open").cast<bool>()) region = region.attr("outer");
  if (region.is_none()) return std::nullopt;
  const py::object fields = region.attr("fields");
  if (fields.is_none()) return CodecWord();
  return CodecWord(choice_of(fields.cast<CodecFields>()));
}

}  // namespace pycoll::torch_adapter
