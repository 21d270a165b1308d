// Element maths, written once: the reduce operators and how accumulators become values.
//
// Everything here sits in an unnamed namespace on purpose. The header is compiled with several
// instruction sets into one library; were these functions ordinary inline functions, the linker
// could keep the AVX-512 copy of one and a baseline machine would die of it.
//
// The operators also accept GCC vector types (__m256, __m512) where their body allows it.
#pragma once

#include <type_traits>

#include "kernels/float_formats.h"

namespace pycoll::element {
namespace {

// A bool of the caller: any byte but 0 is true. Results are 0 and 1.
struct Bool8 {
  uint8_t bits;
};

// value -> accumulator and back; the identity where both are one type.
template <typename To, typename From>
PYCOLL_HD To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_integral_v<To>) {
    return static_cast<To>(x);
  } else if constexpr (std::is_same_v<To, float>) {
    return to_float32(x);
  } else {
    return round_to<To>(x);
  }
}

// Without sign and payload. Hardware disagrees on which NaN an operation gives.
template <typename T>
constexpr T kQuietNanOf = static_cast<T>(__builtin_nanf(""));

// Makes every NaN the one NaN.
template <typename T>
PYCOLL_HD T only_nan(T x) {
  return x == x ? x : kQuietNanOf<T>;
}

// ---- Operators. ----

// Unsigned arithmetic wraps; 32 bits at least, since uint16_t * uint16_t would promote to int.
template <typename T>
using Modular = std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>;

// Hardware keeps the payload of one of two NaN operands, and the compiler may swap the operands of
// a commutative instruction, differently in a vector body and its scalar tail. So a NaN in `a` is
// combined with itself: the first one wins whatever the compiler does. Choosing between results,
// not operands, lets the loads of `a` and `b` go side by side.

struct Sum {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Modular<T>>(a) + static_cast<Modular<T>>(b));
    } else {
      return a == a ? a + b : a + a;
    }
  }
};

struct Product {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Modular<T>>(a) * static_cast<Modular<T>>(b));
    } else {
      return a == a ? a * b : a * a;
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
struct Layout<Float8E4M3> {
  using Int = int8_t;
  static constexpr Int infinity = 0x7e;  // the largest finite one: there is no infinity
};
template <>
struct Layout<Float8E5M2> {
  using Int = int8_t;
  static constexpr Int infinity = 0x7c;
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
// greater one. Integers only, so the same code serves all float types.
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

struct And {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
  PYCOLL_HD Bool8 operator()(Bool8 a, Bool8 b) const {
    return {static_cast<uint8_t>((a.bits != 0) & (b.bits != 0))};
  }
};

struct Or {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
  PYCOLL_HD Bool8 operator()(Bool8 a, Bool8 b) const {
    return {static_cast<uint8_t>((a.bits | b.bits) != 0)};
  }
};

struct Xor {
  template <typename T>
  PYCOLL_HD T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
  PYCOLL_HD Bool8 operator()(Bool8 a, Bool8 b) const {
    return {static_cast<uint8_t>((a.bits != 0) != (b.bits != 0))};
  }
};

// acc / world_size as AVG wants it: IEEE division for floats, truncation toward zero for integers.
template <typename T>
struct Divide {
  // Through double where that is exact (32 bits fit): it vectorises, integer division does not.
  using Divisor =
      std::conditional_t<std::is_integral_v<T>, std::conditional_t<(sizeof(T) > 4), T, double>, T>;
  Divisor divisor;
  PYCOLL_HD explicit Divide(int world_size) : divisor(static_cast<Divisor>(world_size)) {}
  PYCOLL_HD T operator()(T x) const { return static_cast<T>(static_cast<Divisor>(x) / divisor); }
};

}  // namespace
}  // namespace pycoll::element
