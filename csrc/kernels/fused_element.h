// Maths of the fused kernels, the same for CPU and CUDA. In an unnamed namespace for the reason
// that element.h gives.
#pragma once

#include <cstdint>

#include "kernels/element.h"

namespace pycoll::element {
namespace {

template <typename T>
PYCOLL_HD T scaled(T x, T factor) {
  return only_nan(x * factor);
}

PYCOLL_HD bool is_finite(float x) {
  return (bits_as<uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}
PYCOLL_HD bool is_finite(double x) {
  return (bits_as<uint64_t>(x) & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}

// Exact for all but float64.
template <typename T>
PYCOLL_HD double square(T x) {
  const auto wide = static_cast<double>(x);
  return wide * wide;
}

// Bits of the least float32 magnitude that is not finite once it is rounded to the type.
template <typename T>
constexpr uint32_t kLeastNotFinite = 0x7f800000u;
template <>
constexpr uint32_t kLeastNotFinite<Float16> = 0x477ff000u;  // 65520
template <>
constexpr uint32_t kLeastNotFinite<BFloat16> = 0x7f7f8000u;

}  // namespace
}  // namespace pycoll::element
