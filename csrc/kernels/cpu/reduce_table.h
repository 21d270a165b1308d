// What each instruction set contributes: pointers to its kernels by type and operation.
#pragma once

#include "kernels/reduce.h"

namespace pycoll {

struct ReduceTable {
  // nullptr where the operation is not defined for the type.
  const ReduceKernels* entry[static_cast<int>(DType::kCount)][static_cast<int>(ReduceOp::kCount)];
};

extern const ReduceTable reduce_table_baseline;
extern const ReduceTable reduce_table_avx2;    // empty unless built for x86
extern const ReduceTable reduce_table_avx512;  // empty unless built for x86

}  // namespace pycoll
