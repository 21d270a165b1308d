// Reduce operations as callers write them.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/dtype.h"

namespace pycoll {

// Texts that stand in Python code are one object each, so most often comparing addresses tells
// which is meant, for a hundredth of what a conversion costs. Made and used with the GIL.
class OpNames {
 public:
  OpNames() {
    for (int i = 0; i < static_cast<int>(ReduceOp::kCount); ++i) {
      const auto op = static_cast<ReduceOp>(i);
      // The first needs a reduction, the last a factor: neither is a plain operation.
      if (op == ReduceOp::none || op == ReduceOp::premul_sum) continue;
      const std::string name(name_of(op));
      names_.emplace_back(
          pybind11::reinterpret_steal<pybind11::object>(PyUnicode_InternFromString(name.c_str())),
          op);
    }
  }
  // Nothing: some other object, which may still be equal to a name.
  std::optional<ReduceOp> find(PyObject* name) const {
    for (const auto& [known, op] : names_) {
      if (known.ptr() == name) return op;
    }
    return std::nullopt;
  }

 private:
  std::vector<std::pair<pybind11::object, ReduceOp>> names_;
};

}  // namespace pycoll
