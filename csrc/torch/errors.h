// pycoll's errors and times as torch has them.
#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <string>

#include "core/clock.h"
#include "core/error.h"

namespace pycoll::torch_adapter {

// Negative is no limit: torch wraps timedelta.max round to that.
inline Nanoseconds time_limit(std::chrono::milliseconds timeout) {
  return timeout < std::chrono::milliseconds(0) ? kNoLimit : Nanoseconds(saturated(timeout));
}

// The caller's fault, found before anything was sent: RuntimeError in Python.
// `operation` is what profilers show: "pycoll:all_reduce".
template <typename... Parts>
[[noreturn]] void refuse(const char* operation, const Parts&... parts) {
  C10_THROW_ERROR(Error, concat(operation, ": ", parts...));
}

// The exception classes that torch users catch.
[[noreturn]] inline void throw_torch_error(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::invalid_argument:
      C10_THROW_ERROR(Error, error.what());
    case ErrorKind::not_implemented:
      C10_THROW_ERROR(NotImplementedError, error.what());
    default:
      C10_THROW_ERROR(DistBackendError, error.what());
  }
}

template <typename Function>
auto with_torch_errors(Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error& error) {
    throw_torch_error(error);
  }
}

inline std::exception_ptr as_torch_error(std::exception_ptr error) {
  if (!error) return nullptr;
  try {
    with_torch_errors([&] { std::rethrow_exception(error); });
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace pycoll::torch_adapter
