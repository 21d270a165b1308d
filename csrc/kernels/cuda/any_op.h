// Every pair of element type and reduce operation as a few numbers, which the kernels that switch
// at run time go by (any_op.cuh). The pairs are those of the CPU's tables
// (kernels/cpu/reduce_impl.h).
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace pycoll::cuda {

// How an element lies in memory and what its bits become in a 64-bit register.
enum class Format : uint8_t {
  u8,
  u16,
  u32,
  u64,
  s8,  // extended by their sign
  s16,
  s32,
  s64,
};

// From the bits of a value to those of an accumulator, and back.
enum class Conversion : uint8_t { none, float16, bfloat16, float8_e4m3, float8_e5m2 };

enum class Combine : uint8_t {
  add,
  multiply,
  add_float32,
  multiply_float32,
  add_float64,
  multiply_float64,
  lesser,  // of signed integers; of floats by the order of their bits, NaN first
  greater,
  lesser_unsigned,
  greater_unsigned,
  bit_and,
  bit_or,
  bit_xor,
  all,  // of booleans: results are 0 and 1
  any,
  odd,
};

// What AVG does to a complete sum.
enum class Division : uint8_t { none, signed_integer, unsigned_integer, float32, float64 };

struct AnyOp {
  Format value = Format::u8;
  Format acc = Format::u8;
  Conversion conversion = Conversion::none;
  Combine combine = Combine::add;
  Division division = Division::none;
  uint8_t parts = 1;       // complex numbers are two floats, combined on their own
  int32_t world_size = 1;  // divisor
  // lesser and greater of floats: the bits of infinity (what lies above is NaN), and all bits but
  // the sign; 0: integers, whose order is that of the register.
  int64_t infinity = 0;
  int64_t magnitude = 0;
  uint32_t value_bytes = 1;  // of a part
  uint32_t acc_bytes = 1;
};

// False where the operation is not defined for the type.
bool find_any_op(DType dtype, ReduceOp op, int32_t world_size, AnyOp* found);

}  // namespace pycoll::cuda
