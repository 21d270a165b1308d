// Narrow floating-point formats and their conversions to and from float32, written once. In an
// unnamed namespace for the reason that element.h gives.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define PYCOLL_HD __host__ __device__ inline
#else
#define PYCOLL_HD inline __attribute__((always_inline))
#endif

namespace pycoll::element {
namespace {

// IEEE 754 binary16, and the upper half of a binary32. Distinct types, so that overloads pick the
// right conversion.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
PYCOLL_HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// ---- Conversions. Selects instead of branches, so that loops over them vectorise (with gcc under
// -fno-trapping-math only: else it guards the float operations by branches). ----

// Exact. A signaling NaN becomes quiet, as in F16C.
PYCOLL_HD float to_float32(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);  // exponent bias 15 -> 127
  const uint32_t infinity_or_nan = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u) << 22;
  // magnitude * 2^-24 is a normal float32: no rounding, and flush-to-zero modes do not touch it.
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  uint32_t bits = magnitude < 0x0400u ? bits_as<uint32_t>(small) : normal;
  bits = magnitude >= 0x7c00u ? infinity_or_nan : bits;
  return bits_as<float>(sign | bits);
}

PYCOLL_HD float to_float32(BFloat16 x) {
  return bits_as<float>(uint32_t{x.bits} << 16);
}

template <typename To>
PYCOLL_HD To round_to(float x);

// Nearest even. A NaN keeps its sign and the upper payload bits and is quiet.
template <>
PYCOLL_HD Float16 round_to<Float16>(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t nearest_even = 0xfffu + ((magnitude >> 13) & 1u);
  const uint32_t normal = (magnitude - (112u << 23) + nearest_even) >> 13;
  // 0.5 has an ulp of 2^-24, the spacing of subnormal halves: the addition rounds for us.
  const uint32_t small = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
  half = magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x3ffu)) : half;
  return {static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u))};
}

template <>
PYCOLL_HD BFloat16 round_to<BFloat16>(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

// ---- 8-bit floats (OCP "OFP8"). ----

// A format: `spacing` is the distance of its subnormals, `overflow` the code that a magnitude
// beyond the largest finite one rounds to. Codes above `overflow` are NaN.

// No infinity: overflow saturates at 448, as torch's cast does.
struct Float8E4M3 {
  static constexpr int mantissa_bits = 3, bias = 7;
  static constexpr float spacing = 0x1p-9f;
  static constexpr uint32_t overflow = 0x7e;
  static constexpr bool has_infinity = false;
  uint8_t bits;
};

struct Float8E5M2 {
  static constexpr int mantissa_bits = 2, bias = 15;
  static constexpr float spacing = 0x1p-16f;
  static constexpr uint32_t overflow = 0x7c;  // infinity
  static constexpr bool has_infinity = true;
  uint8_t bits;
};

// Exact; every NaN becomes the quiet one without payload, with its sign.
template <typename F>
PYCOLL_HD float from_float8(F x) {
  constexpr uint32_t rebias = static_cast<uint32_t>(127 - F::bias) << 23;
  const uint32_t sign = uint32_t{x.bits & 0x80u} << 24;
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t normal = (magnitude << (23 - F::mantissa_bits)) + rebias;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * F::spacing;
  uint32_t bits = magnitude < (1u << F::mantissa_bits) ? bits_as<uint32_t>(small) : normal;
  if constexpr (F::has_infinity) {
    bits = magnitude == F::overflow ? 0x7f800000u : bits;
  }
  bits = magnitude > F::overflow ? 0x7fc00000u : bits;
  return bits_as<float>(sign | bits);
}

// Nearest even. NaN becomes the code of all ones, with its sign.
template <typename F>
PYCOLL_HD F to_float8(float x) {
  constexpr uint32_t rebias = static_cast<uint32_t>(127 - F::bias) << 23;
  constexpr int dropped = 23 - F::mantissa_bits;
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t nearest_even = (1u << (dropped - 1)) - 1u + ((magnitude >> dropped) & 1u);
  const uint32_t normal = (magnitude - rebias + nearest_even) >> dropped;
  // The ulp of `shifter` is the spacing of subnormals: the addition rounds for us.
  constexpr float shifter = F::spacing * 0x1p23f;
  const uint32_t small =
      bits_as<uint32_t>(bits_as<float>(magnitude) + shifter) - bits_as<uint32_t>(shifter);
  uint32_t code = magnitude < rebias + (1u << 23) ? small : normal;
  code = code > F::overflow ? F::overflow : code;
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return {static_cast<uint8_t>(code | ((bits >> 24) & 0x80u))};
}

PYCOLL_HD float to_float32(Float8E4M3 x) {
  return from_float8(x);
}
PYCOLL_HD float to_float32(Float8E5M2 x) {
  return from_float8(x);
}
template <>
PYCOLL_HD Float8E4M3 round_to<Float8E4M3>(float x) {
  return to_float8<Float8E4M3>(x);
}
template <>
PYCOLL_HD Float8E5M2 round_to<Float8E5M2>(float x) {
  return to_float8<Float8E5M2>(x);
}

}  // namespace
}  // namespace pycoll::element
