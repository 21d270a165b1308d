// Where lists of arrays lie: one table a list, so that thousands of small ones cost no Python
// objects of their own.
#pragma once

#include <cstdint>

namespace pycoll {

// A row; as pycoll/_host_arrays.py makes them, where the torch module does not.
struct Span {
  uint64_t address;
  uint64_t count;  // elements
  uint64_t dtype;  // DType
};
static_assert(sizeof(Span) == 3 * sizeof(uint64_t));

}  // namespace pycoll
