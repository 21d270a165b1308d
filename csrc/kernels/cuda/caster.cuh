// Casts of vectors, with a factor, and a look for infinities and NaN.
#pragma once

#include "kernels/cuda/loops.cuh"
#include "kernels/fused_element.h"

namespace pycoll::cuda {

// To nearest, ties to even; every NaN becomes the one NaN. Conversion instructions make another.
template <class T>
PYCOLL_DEVICE T rounded(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return element::only_nan(x);
  } else {
    constexpr uint16_t kNan = std::is_same_v<T, __half> ? 0x7e00 : 0x7fc0;
    return x == x ? device::from_float<T>(x) : element::bits_as<T>(kNan);
  }
}

// Called by whole warps. Many may store the same.
PYCOLL_DEVICE void report_found_inf(bool found, float* found_inf) {
  const bool any = __any_sync(0xffffffffu, found ? 1 : 0) != 0;
  if (found_inf == nullptr || !any || threadIdx.x % 32 != 0) return;
  device::store_relaxed<device::Scope::device>(reinterpret_cast<uint32_t*>(found_inf),
                                               element::bits_as<uint32_t>(1.0f));
}

template <class From, class To>
class Caster {
 public:
  // As many elements as sixteen bytes of the narrower type have.
  static constexpr int kPack = 16 / (sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));

  PYCOLL_DEVICE Caster(const From* input, To* output, float scale)
      : input_(input), output_(output), scale_(scale) {}

  PYCOLL_DEVICE void run(const Team& team, uint64_t count) {
    const uint64_t packs = (low_bits(input_) | low_bits(output_)) == 0 ? count / kPack : 0;
    for_each<2>(team, packs, [&](auto batch, uint64_t first, uint64_t stride) {
      constexpr int kSize = decltype(batch)::kSize;
      From x[kSize][kPack];
#pragma unroll
      for (int u = 0; u < kSize; ++u) load(first + u * stride, x[u]);
#pragma unroll
      for (int u = 0; u < kSize; ++u) cast_pack(first + u * stride, x[u]);
    });
    const uint64_t done = packs * kPack;
    for_each<1>(team, count - done, [&](auto, uint64_t first, uint64_t) {
      output_[done + first] = one(input_[done + first]);
    });
  }

  PYCOLL_DEVICE bool found_inf() const {
    return found_inf_;
  }

 private:
  PYCOLL_DEVICE To one(From x) {
    const To y = rounded<To>(element::scaled(device::to_float(x), scale_));
    found_inf_ |= !element::is_finite(device::to_float(y));
    return y;
  }
  PYCOLL_DEVICE void load(uint64_t pack, From (&x)[kPack]) const {
    constexpr int kLength = device::Pack<From>::kLength;
#pragma unroll
    for (int part = 0; part < kPack / kLength; ++part) {
      const auto values = device::load_pack(input_ + pack * kPack + part * kLength);
#pragma unroll
      for (int k = 0; k < kLength; ++k) x[part * kLength + k] = values.v[k];
    }
  }
  PYCOLL_DEVICE void cast_pack(uint64_t pack, const From (&x)[kPack]) {
    constexpr int kLength = device::Pack<To>::kLength;
#pragma unroll
    for (int part = 0; part < kPack / kLength; ++part) {
      device::Pack<To> values;
#pragma unroll
      for (int k = 0; k < kLength; ++k) values.v[k] = one(x[part * kLength + k]);
      device::store_pack(output_ + pack * kPack + part * kLength, values);
    }
  }

  const From* input_;
  To* output_;
  float scale_;
  bool found_inf_ = false;
};

}  // namespace pycoll::cuda
