// Element types: one table, so that adding a type is adding a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace pycoll {

// The numeric values travel between ranks (in call headers): append, never reorder.
enum class DType : uint8_t {
  bool8,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  float8_e4m3fn,
  float8_e5m2,
  float8_e4m3fnuz,
  float8_e5m2fnuz,
  float8_e8m0fnu,
  float4_e2m1fn_x2,  // two 4-bit floats a byte
  complex32,
  kCount,
};

// What arithmetic a type has; `opaque` bytes are moved and never reduced.
enum class DTypeKind : uint8_t { boolean, integer, floating, complex, opaque, kCount };

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  uint32_t size;  // bytes an element
  DTypeKind kind;
};

const DTypeInfo& dtype_info(DType dtype);
inline std::string_view name_of(DType dtype) {
  return dtype_info(dtype).name;
}
inline size_t size_of(DType dtype) {
  return dtype_info(dtype).size;
}
std::optional<DType> dtype_from_name(std::string_view name);

// How contributions are combined. `none` is for collectives that only move bytes.
enum class ReduceOp : uint8_t {
  none,
  sum,
  avg,
  product,
  min,
  max,
  band,
  bor,
  bxor,
  premul_sum,
  kCount,
};

std::string_view name_of(ReduceOp op);
std::optional<ReduceOp> reduce_op_from_name(std::string_view name);

}  // namespace pycoll
