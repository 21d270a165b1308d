#include "kernels/cuda/any_op.h"

namespace pycoll::cuda {
namespace {

enum class Kind : uint8_t { boolean, signed_integer, unsigned_integer, narrow, float32, float64 };

struct Row {
  DType dtype;
  Kind kind;
  Format format;  // of a part
  uint8_t parts;
  Conversion conversion;
  Format sum_of_avg;  // integers: what AVG sums in
  int64_t infinity;   // floats
};

constexpr Row integer(DType dtype, Kind kind, Format format, Format sum_of_avg) {
  return {dtype, kind, format, 1, Conversion::none, sum_of_avg, 0};
}
// Floats are loaded with their sign extended, for the order of their bits.
constexpr Row floating(DType dtype, Kind kind, Format format, Conversion conversion,
                       int64_t infinity, uint8_t parts = 1) {
  return {dtype, kind, format, parts, conversion, format, infinity};
}

constexpr int64_t kInfinity32 = 0x7f800000, kInfinity64 = 0x7ff0000000000000;

constexpr Row kRows[] = {
    integer(DType::bool8, Kind::boolean, Format::u8, Format::u8),
    integer(DType::int8, Kind::signed_integer, Format::s8, Format::s32),
    integer(DType::int16, Kind::signed_integer, Format::s16, Format::s32),
    integer(DType::int32, Kind::signed_integer, Format::s32, Format::s64),
    integer(DType::int64, Kind::signed_integer, Format::s64, Format::s64),
    integer(DType::uint8, Kind::unsigned_integer, Format::u8, Format::u32),
    integer(DType::uint16, Kind::unsigned_integer, Format::u16, Format::u32),
    integer(DType::uint32, Kind::unsigned_integer, Format::u32, Format::u64),
    integer(DType::uint64, Kind::unsigned_integer, Format::u64, Format::u64),
    floating(DType::float16, Kind::narrow, Format::s16, Conversion::float16, 0x7c00),
    floating(DType::bfloat16, Kind::narrow, Format::s16, Conversion::bfloat16, 0x7f80),
    floating(DType::float32, Kind::float32, Format::s32, Conversion::none, kInfinity32),
    floating(DType::float64, Kind::float64, Format::s64, Conversion::none, kInfinity64),
    floating(DType::complex64, Kind::float32, Format::s32, Conversion::none, kInfinity32, 2),
    floating(DType::complex128, Kind::float64, Format::s64, Conversion::none, kInfinity64, 2),
    // e4m3 has no infinity: 0x7e is its largest finite code.
    floating(DType::float8_e4m3fn, Kind::narrow, Format::s8, Conversion::float8_e4m3, 0x7e),
    floating(DType::float8_e5m2, Kind::narrow, Format::s8, Conversion::float8_e5m2, 0x7c),
};

uint32_t bytes_of(Format format) {
  return 1u << (static_cast<uint32_t>(format) & 3);
}

bool is_float(Kind kind) {
  return kind == Kind::narrow || kind == Kind::float32 || kind == Kind::float64;
}

Combine arithmetic(Kind kind, bool product) {
  if (kind == Kind::float64) return product ? Combine::multiply_float64 : Combine::add_float64;
  if (is_float(kind)) return product ? Combine::multiply_float32 : Combine::add_float32;
  return product ? Combine::multiply : Combine::add;
}

Division division_of(Kind kind) {
  switch (kind) {
    case Kind::signed_integer:
      return Division::signed_integer;
    case Kind::unsigned_integer:
      return Division::unsigned_integer;
    case Kind::float64:
      return Division::float64;
    case Kind::narrow:
    case Kind::float32:
      return Division::float32;
    case Kind::boolean:
      break;
  }
  return Division::none;
}

// Sums and products: what partial results are held in, and how they become values.
void hold_sums(const Row& row, ReduceOp op, int32_t world_size, AnyOp* found) {
  found->combine = arithmetic(row.kind, op == ReduceOp::product);
  if (row.kind == Kind::narrow) {
    found->acc = Format::s32;
    found->conversion = row.conversion;
  }
  if (op != ReduceOp::avg) return;
  if (!is_float(row.kind)) found->acc = row.sum_of_avg;
  found->division = division_of(row.kind);
  found->world_size = world_size;
}

void order(const Row& row, bool lesser, AnyOp* found) {
  if (row.kind == Kind::unsigned_integer) {
    found->combine = lesser ? Combine::lesser_unsigned : Combine::greater_unsigned;
    return;
  }
  found->combine = lesser ? Combine::lesser : Combine::greater;
  if (!is_float(row.kind)) return;
  found->infinity = row.infinity;
  found->magnitude = static_cast<int64_t>((uint64_t{1} << (bytes_of(row.format) * 8 - 1)) - 1);
}

// The average of booleans, truncated, is 1 only when all are true.
Combine logical(ReduceOp op) {
  switch (op) {
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band:
    case ReduceOp::avg:
      return Combine::all;
    case ReduceOp::bxor:
      return Combine::odd;
    default:
      return Combine::any;
  }
}

bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

Combine bitwise(ReduceOp op) {
  if (op == ReduceOp::band) return Combine::bit_and;
  return op == ReduceOp::bor ? Combine::bit_or : Combine::bit_xor;
}

bool is_defined(const Row& row, ReduceOp op) {
  if (op == ReduceOp::none || op >= ReduceOp::kCount) return false;
  if (op == ReduceOp::sum || op == ReduceOp::avg) return true;
  if (op == ReduceOp::premul_sum) return is_float(row.kind);
  if (row.parts > 1) return false;
  return !is_bitwise(op) || !is_float(row.kind);
}

}  // namespace

bool find_any_op(DType dtype, ReduceOp op, int32_t world_size, AnyOp* found) {
  for (const Row& row : kRows) {
    if (row.dtype != dtype) continue;
    if (!is_defined(row, op)) return false;
    *found = AnyOp{};
    found->value = found->acc = row.format;
    found->parts = row.parts;
    if (row.kind == Kind::boolean) {
      found->combine = logical(op);
    } else if (is_bitwise(op)) {
      found->combine = bitwise(op);
    } else if (op == ReduceOp::min || op == ReduceOp::max) {
      order(row, op == ReduceOp::min, found);
    } else {
      hold_sums(row, op, world_size, found);
    }
    found->value_bytes = bytes_of(found->value);
    found->acc_bytes = bytes_of(found->acc);
    return true;
  }
  return false;
}

}  // namespace pycoll::cuda
