// The flight recorder of a module's groups, as Python sees it. pycoll/flight has the documentation.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "gil.h"
#include "runtime/flight.h"

namespace pycoll {

inline std::shared_ptr<FlightRecorder> bind_flight(pybind11::module_& m, const char* label) {
  const auto recorder = std::make_shared<FlightRecorder>(label);
  m.def("flight_snapshot", [recorder] { return pybind11::bytes(recorder->snapshot()); });
  m.def(
      "dump_flight", [recorder](const std::string& directory) { return recorder->dump(directory); },
      pybind11::call_guard<GilRelease>());
  return recorder;
}

}  // namespace pycoll
