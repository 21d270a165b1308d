// Maths of the codecs, one value or one block's scale at a time, the same for CPU and CUDA. In an
// unnamed namespace for the reason that element.h gives.
//
// Every operation is one IEEE operation of float32 (no contraction, no reciprocals), so that all
// forms give the same bits. Divisions are divisions: x * (1 / s) gives other codes.
#pragma once

#include <cstdint>

#include "kernels/element.h"

namespace pycoll::element {
namespace {

constexpr float kQuietNan = kQuietNanOf<float>;
constexpr float kLargest = 3.40282346638528859812e+38f;

// Bits of a float without its sign have the order of magnitudes, NaN above infinity.
PYCOLL_HD uint32_t magnitude_bits(float x) {
  return bits_as<uint32_t>(x) & 0x7fffffffu;
}
constexpr uint32_t kNotFinite = 0x7f800000u;
constexpr uint32_t kLeastMagnitude = 0x0da24260u;  // 1e-30f

enum class BlockClass { zeros, finite, not_finite };
PYCOLL_HD BlockClass class_of(uint32_t largest_magnitude) {
  if (largest_magnitude >= kNotFinite) return BlockClass::not_finite;
  return largest_magnitude < kLeastMagnitude ? BlockClass::zeros : BlockClass::finite;
}

// Nearest integer, ties to even, of |x| <= 2^22: the spacing of floats there is 1.
PYCOLL_HD int32_t nearest(float x) {
  return bits_as<int32_t>(x + 0x1.8p23f) - 0x4b400000;
}
PYCOLL_HD int32_t floor_of(float x) {
  const auto toward_zero = static_cast<int32_t>(x);
  return toward_zero - static_cast<int32_t>(static_cast<float>(toward_zero) > x);
}
PYCOLL_HD int32_t clamp(int32_t x, int32_t low, int32_t high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// What is encoded where there is error feedback. Hardware differs in the NaN that it makes: one of
// `value` is kept, any other is the quiet one.
PYCOLL_HD float with_residual(float value, float residual) {
  const float sum = value + residual;
  const float nan = value == value ? kQuietNan : value;
  return sum == sum ? sum : nan;
}

// What is known of a block before its scales are.
struct BlockFacts {
  uint32_t count;
  float largest;  // magnitude
  float least;    // value
  float most;
  float mean;         // of magnitudes
  float mean_square;  // of value / largest
};

struct Scales {
  float first;
  float second;
};

// The scale at which `most` steps reach the largest magnitude, one bit less where their product
// would be beyond float32.
PYCOLL_HD float scale_for(float largest, float most) {
  const float scale = largest / most;
  const uint32_t bits = bits_as<uint32_t>(scale);
  return scale * most > kLargest ? bits_as<float>(bits - 1) : scale;
}

// A codec of blocks. `code` is in [0, 2^bits), `u` uniform in [0, 1) for stochastic rounding.

// Symmetric integers of kQ = 2^(bits-1) - 1 steps to each side: the largest magnitude is kQ.
template <int kBits>
struct SymmetricInteger {
  static constexpr int bits = kBits;
  static constexpr int scales = 1;
  static constexpr bool stochastic = true;
  static constexpr int32_t steps = (1 << (kBits - 1)) - 1;
  static constexpr uint32_t mask = (1u << kBits) - 1;

  static PYCOLL_HD Scales scales_of(const BlockFacts& facts) {
    return {scale_for(facts.largest, static_cast<float>(steps)), 0};
  }
  static PYCOLL_HD uint32_t encode(float x, const Scales& s) {
    return static_cast<uint32_t>(nearest(x / s.first)) & mask;
  }
  static PYCOLL_HD uint32_t encode(float x, const Scales& s, float u) {
    const int32_t code = clamp(floor_of(x / s.first + u), -steps, steps);
    return static_cast<uint32_t>(code) & mask;
  }
  static PYCOLL_HD float decode(uint32_t code, const Scales& s) {
    constexpr auto sign = static_cast<int32_t>(1u << (kBits - 1));
    return static_cast<float>((static_cast<int32_t>(code) ^ sign) - sign) * s.first;
  }
};

// Integers between the least and the most value. Halves of values are used, since most - least may
// be beyond float32. Blocks whose range is next to nothing decode as their least value.
template <int kBits>
struct MinMax {
  static constexpr int bits = kBits;
  static constexpr int scales = 2;
  static constexpr bool stochastic = true;
  static constexpr int32_t steps = (1 << kBits) - 1;
  static constexpr float least_step = 1e-37f;  // a normal float32

  static PYCOLL_HD Scales scales_of(const BlockFacts& facts) {
    const float step = (0.5f * facts.most - 0.5f * facts.least) / static_cast<float>(steps);
    return {facts.least, step < least_step ? 0.0f : step};
  }
  // In steps above the least value; a step of 0 gives 0, not 0 / 0.
  static PYCOLL_HD float place(float x, const Scales& s) {
    const float above = 0.5f * x - 0.5f * s.first;
    return s.second > 0 ? above / s.second : 0.0f;
  }
  static PYCOLL_HD uint32_t encode(float x, const Scales& s) {
    return static_cast<uint32_t>(clamp(nearest(place(x, s)), 0, steps));
  }
  static PYCOLL_HD uint32_t encode(float x, const Scales& s, float u) {
    return static_cast<uint32_t>(clamp(floor_of(place(x, s) + u), 0, steps));
  }
  static PYCOLL_HD float decode(uint32_t code, const Scales& s) {
    const float above = static_cast<float>(static_cast<int32_t>(code)) * s.second;
    const float x = 2.0f * (0.5f * s.first + above);
    // Rounding may go a step beyond the largest float32. NaN passes.
    const float below = x > kLargest ? kLargest : x;
    return below < -kLargest ? -kLargest : below;
  }
};

template <typename Format>
struct ScaledFloat8 {
  static constexpr int bits = 8;
  static constexpr int scales = 1;
  static constexpr bool stochastic = false;
  static constexpr float largest = Format::has_infinity ? 57344.0f : 448.0f;

  static PYCOLL_HD Scales scales_of(const BlockFacts& facts) {
    return {scale_for(facts.largest, largest), 0};
  }
  static PYCOLL_HD uint32_t encode(float x, const Scales& s) {
    // A quotient just above `largest` rounds down to it.
    return round_to<Format>(x / s.first).bits;
  }
  static PYCOLL_HD float decode(uint32_t code, const Scales& s) {
    return to_float32(Format{static_cast<uint8_t>(code)}) * s.first;
  }
};

// Signs, and the mean magnitude, which is best in the mean square (Bernstein et al., 2018; the L1
// scale of Karimireddy et al., 2019). 1 is negative; -0 counts as positive.
struct Sign {
  static constexpr int bits = 1;
  static constexpr int scales = 1;
  static constexpr bool stochastic = false;

  static PYCOLL_HD Scales scales_of(const BlockFacts& facts) { return {facts.mean, 0}; }
  static PYCOLL_HD uint32_t encode(float x, const Scales&) { return x < 0 ? 1 : 0; }
  static PYCOLL_HD float decode(uint32_t code, const Scales& s) {
    return code != 0 ? -s.first : s.first;
  }
};

// -s, 0 or s, by chance, so that the mean is right (TernGrad, Wen et al., 2017), after clipping at
// 2.5 root mean squares.
struct Ternary {
  static constexpr int bits = 2;
  static constexpr int scales = 1;
  static constexpr bool stochastic = true;

  static PYCOLL_HD Scales scales_of(const BlockFacts& facts) {
    const float clip = 2.5f * __builtin_sqrtf(facts.mean_square);
    return {clip < 1.0f ? clip * facts.largest : facts.largest, 0};
  }
  static PYCOLL_HD uint32_t encode(float x, const Scales& s, float u) {
    const float chance = bits_as<float>(magnitude_bits(x)) / s.first;
    const uint32_t code = x < 0 ? 3 : 1;
    return u < chance ? code : 0;
  }
  static PYCOLL_HD float decode(uint32_t code, const Scales& s) {
    return static_cast<float>((static_cast<int32_t>(code) ^ 2) - 2) * s.first;
  }
};

// ---- Sums over a block: 16 partial sums, value i in sum i % 16, then halves added to halves. That
// order is the same for vectors of any width and for warps. ----

constexpr uint32_t kSumLanes = 16;

// Terms of the mean magnitude are made small, so that no sum is beyond float32: a block has at most
// 2^12 values.
constexpr float kMeanScale = 0x1p-12f;
PYCOLL_HD float mean_term(float x) {
  return bits_as<float>(magnitude_bits(x)) * kMeanScale;
}
PYCOLL_HD float mean_of(float sum, uint32_t count) {
  const float mean = sum / static_cast<float>(static_cast<int32_t>(count)) / kMeanScale;
  return mean > kLargest ? kLargest : mean;
}
PYCOLL_HD float square_term(float x, float largest) {
  const float ratio = x / largest;
  return ratio * ratio;
}

// ---- fp16: a power of two for the whole vector. ----

// The least exponent >= 0 for which the largest finite magnitude * 2^-exponent does not round to
// infinity: 65520 does.
PYCOLL_HD int32_t half_exponent(uint32_t largest_magnitude) {
  constexpr uint32_t overflow = 0x477ff000u;  // 65520
  if (largest_magnitude < overflow) return 0;
  const auto above = static_cast<int32_t>((largest_magnitude - overflow) >> 23);
  return above + 1;
}

// 2^exponent, |exponent| <= 126.
PYCOLL_HD float power_of_two(int32_t exponent) {
  return bits_as<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// What a value of the code is multiplied by. Whatever comes in place of an exponent is one.
PYCOLL_HD float half_factor(int32_t exponent) {
  return power_of_two(clamp(exponent, 0, 126));
}

// x * factor; a NaN is kept, bits and all.
PYCOLL_HD float scaled(float x, float factor) {
  const float product = x * factor;
  return x == x ? product : x;
}

// x * factor; a finite x gives a finite product.
PYCOLL_HD float product_within(float x, float factor) {
  const float product = x * factor;
  const float limit = x < 0 ? -kLargest : kLargest;
  const bool overflow = magnitude_bits(product) == kNotFinite && magnitude_bits(x) < kNotFinite;
  return overflow ? limit : product;
}

}  // namespace
}  // namespace pycoll::element
