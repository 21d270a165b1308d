// What Python callers write, as the core's types.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "core/clock.h"
#include "core/error.h"

namespace pycoll {

inline Nanoseconds from_seconds(double seconds) {
  if (!(seconds >= 0)) {
    fail(ErrorKind::invalid_argument, "a timeout of ", seconds, " s is not a time to wait");
  }
  return std::chrono::duration_cast<Nanoseconds>(
      std::chrono::duration<double>(std::min(seconds, to_seconds(kNoLimit))));
}

// Enumerators go by name_of().
template <typename Enum>
Enum parse_enum(const std::string& name, const char* what) {
  for (int i = 0; i < static_cast<int>(Enum::kCount); ++i) {
    if (name_of(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
  }
  std::string known;
  for (int i = 0; i < static_cast<int>(Enum::kCount); ++i) {
    const std::string each(name_of(static_cast<Enum>(i)));
    if (each != "none") known += (known.empty() ? "" : ", ") + each;
  }
  fail(ErrorKind::invalid_argument, "'", name, "' is no ", what, "; there are: ", known);
}

}  // namespace pycoll
