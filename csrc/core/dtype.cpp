#include "core/dtype.h"

#include <array>

namespace pycoll {
namespace {

constexpr std::array<DTypeInfo, static_cast<size_t>(DType::kCount)> kDTypes{{
    {DType::bool8, "bool", 1, DTypeKind::boolean},
    {DType::int8, "int8", 1, DTypeKind::integer},
    {DType::int16, "int16", 2, DTypeKind::integer},
    {DType::int32, "int32", 4, DTypeKind::integer},
    {DType::int64, "int64", 8, DTypeKind::integer},
    {DType::uint8, "uint8", 1, DTypeKind::integer},
    {DType::uint16, "uint16", 2, DTypeKind::integer},
    {DType::uint32, "uint32", 4, DTypeKind::integer},
    {DType::uint64, "uint64", 8, DTypeKind::integer},
    {DType::float16, "float16", 2, DTypeKind::floating},
    {DType::bfloat16, "bfloat16", 2, DTypeKind::floating},
    {DType::float32, "float32", 4, DTypeKind::floating},
    {DType::float64, "float64", 8, DTypeKind::floating},
    {DType::complex64, "complex64", 8, DTypeKind::complex},
    {DType::complex128, "complex128", 16, DTypeKind::complex},
    {DType::float8_e4m3fn, "float8_e4m3fn", 1, DTypeKind::floating},
    {DType::float8_e5m2, "float8_e5m2", 1, DTypeKind::floating},
    {DType::float8_e4m3fnuz, "float8_e4m3fnuz", 1, DTypeKind::opaque},
    {DType::float8_e5m2fnuz, "float8_e5m2fnuz", 1, DTypeKind::opaque},
    {DType::float8_e8m0fnu, "float8_e8m0fnu", 1, DTypeKind::opaque},
    {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2", 1, DTypeKind::opaque},
    {DType::complex32, "complex32", 4, DTypeKind::opaque},
}};

constexpr std::array<std::string_view, static_cast<size_t>(ReduceOp::kCount)> kReduceOps{
    "none", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};

constexpr bool rows_match_enum() {
  for (size_t i = 0; i < kDTypes.size(); ++i) {
    if (static_cast<size_t>(kDTypes[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_match_enum(), "kDTypes must list the types in the order of the enum");

}  // namespace

const DTypeInfo& dtype_info(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)];
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return info.dtype;
  }
  return std::nullopt;
}

std::string_view name_of(ReduceOp op) {
  return kReduceOps[static_cast<size_t>(op)];
}

std::optional<ReduceOp> reduce_op_from_name(std::string_view name) {
  for (size_t i = 0; i < kReduceOps.size(); ++i) {
    if (kReduceOps[i] == name) return static_cast<ReduceOp>(i);
  }
  return std::nullopt;
}

}  // namespace pycoll
