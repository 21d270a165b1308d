// Element maths, written once: 16-bit floats and the reduce operators.
//
// Everything here sits in an unnamed namespace on purpose. The header is compiled with several
// instruction sets into one library; were these functions ordinary inline functions, the linker
// could keep the AVX-512 copy of one and a baseline machine would die of it.
//
// The operators also accept GCC vector types (__m256, __m512) where their body allows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

// value -> accumulator and back; the identity where both are one type.
template <typename To, typename From>
PYCOLL_HD To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, float>) {
    return to_float32(x);
  } else {
    return round_to<To>(x);
  }
}

// ---- Operators. ----

// Unsigned arithmetic wraps; 32 bits at least, since uint16_t * uint16_t would promote to int.
template <typename T>
using Modular = std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>;

// Hardware keeps the payload of one of two NaN operands, and the compiler may swap the operands of
// a commutative instruction, differently in a vector body and its scalar tail. With a NaN in `a`
// both operands become that NaN, so that the first one wins whatever the compiler does.
template <typename T>
PYCOLL_HD T unless_nan(T a, T b) {
  return a == a ? b : a;
}

struct Sum {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Modular<T>>(a) + static_cast<Modular<T>>(b));
    } else {
      return a + unless_nan(a, b);
    }
  }
};

struct Product {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Modular<T>>(a) * static_cast<Modular<T>>(b));
    } else {
      return a * unless_nan(a, b);
    }
  }
};

// The bits of a float as an integer, and the bits of infinity: what lies above is NaN.
template <typename T>
struct Layout;
template <>
struct Layout<Float16> {
  using Int = int16_t;
  static constexpr Int infinity = 0x7c00;
};
template <>
struct Layout<BFloat16> {
  using Int = int16_t;
  static constexpr Int infinity = 0x7f80;
};
template <>
struct Layout<float> {
  using Int = int32_t;
  static constexpr Int infinity = 0x7f800000;
};
template <>
struct Layout<double> {
  using Int = int64_t;
  static constexpr Int infinity = 0x7ff0000000000000;
};

// A float's bits with the order of integers: -inf < ... < -0 < +0 < ... < +inf.
template <typename Int>
PYCOLL_HD Int order_key(Int bits) {
  constexpr Int all_but_sign = static_cast<Int>(~(Int{1} << (sizeof(Int) * 8 - 1)));
  return static_cast<Int>(bits ^ ((bits >> (sizeof(Int) * 8 - 1)) & all_but_sign));
}

// Returns one operand unchanged (a signaling NaN stays one): the first NaN, else the lesser or
// greater one. Integers only, so the same code serves all four float types.
template <bool kLesser, typename T>
PYCOLL_HD T select_float(T a, T b) {
  using Int = typename Layout<T>::Int;
  constexpr Int infinity = Layout<T>::infinity;
  constexpr Int all_but_sign = static_cast<Int>(~(Int{1} << (sizeof(Int) * 8 - 1)));
  const Int a_bits = bits_as<Int>(a), b_bits = bits_as<Int>(b);
  const Int a_key = order_key(a_bits), b_key = order_key(b_bits);
  const bool a_nan = static_cast<Int>(a_bits & all_but_sign) > infinity;
  const bool b_nan = static_cast<Int>(b_bits & all_but_sign) > infinity;
  const bool a_first = kLesser ? a_key <= b_key : a_key >= b_key;
  return bits_as<T>((a_nan | (a_first & !b_nan)) ? a_bits : b_bits);
}

struct Min {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return b < a ? b : a;
    } else {
      return select_float<true>(a, b);
    }
  }
};

struct Max {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return a < b ? b : a;
    } else {
      return select_float<false>(a, b);
    }
  }
};

// acc / world_size as AVG wants it: IEEE division for floats, truncation toward zero for integers.
template <typename T>
struct Divide {
  // Through double where that is exact (32 bits fit): it vectorises, integer division does not.
  using Divisor = std::conditional_t<std::is_integral_v<T>,
                                     std::conditional_t<(sizeof(T) > 4), int64_t, double>, T>;
  Divisor divisor;
  PYCOLL_HD explicit Divide(int world_size) : divisor(static_cast<Divisor>(world_size)) {}
  PYCOLL_HD T operator()(T x) const { return static_cast<T>(static_cast<Divisor>(x) / divisor); }
};

}  // namespace
}  // namespace pycoll::element
