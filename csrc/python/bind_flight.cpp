// What readers of flight records need of the core: words for calls, and the clock of the stamps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <string>

#include "bind.h"
#include "core/clock.h"
#include "core/error.h"
#include "transport/call.h"

namespace py = pybind11;

namespace pycoll {
namespace {

// A dump may come from elsewhere, and hold anything: no number of it is trusted.
CallHeader header_from(const std::string& bytes) {
  CallHeader call;
  if (bytes.size() != sizeof(call)) {
    fail(ErrorKind::invalid_argument, "a call has ", sizeof(call), " bytes, not ", bytes.size());
  }
  std::memcpy(&call, bytes.data(), sizeof(call));
  const bool known = call.collective < Collective::kCount && call.dtype < DType::kCount &&
                     call.reduce_op < ReduceOp::kCount;
  if (!known) fail(ErrorKind::invalid_argument, "these bytes are no call of this pycoll");
  return call;
}

}  // namespace

void bind_flight_words(py::module_& m) {
  m.def(
      "describe_call", [](const py::bytes& call) { return to_string(header_from(call)); },
      "A recorded call in words, from its 40 bytes.");
  m.def(
      "call_fingerprint", [](const py::bytes& call) { return fingerprint(header_from(call)); },
      "Equal for calls that fit together, from the 40 bytes of one.");
  m.def(
      "dtype_name",
      [](int dtype) {
        if (dtype < 0 || dtype >= static_cast<int>(DType::kCount)) {
          fail(ErrorKind::invalid_argument, dtype, " is no dtype of this pycoll");
        }
        return std::string(name_of(static_cast<DType>(dtype)));
      },
      "The name of a recorded dtype.");
  m.def("ticks", &ticks, "What this processor's time stamp counts now.");
}

}  // namespace pycoll
