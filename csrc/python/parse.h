// What Python callers write, as the core's types.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>

#include "core/clock.h"
#include "core/error.h"
#include "kernels/reduce.h"

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

// The best one where no name is given.
inline Isa parse_isa(const std::string& name) {
  const Isa isa = name.empty() ? best_isa() : parse_enum<Isa>(name, "instruction set");
  if (!isa_available(isa)) {
    fail(ErrorKind::invalid_argument, "this CPU cannot run the instruction set ", name);
  }
  return isa;
}

}  // namespace pycoll
