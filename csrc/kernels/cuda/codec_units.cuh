// What kernels of codecs work on: eight values a thread, and their codes. See codec.cuh.
#pragma once

#include "kernels/codec_element.h"
#include "kernels/cuda/executor_arguments.h"
#include "kernels/cuda/loops.cuh"

namespace pycoll::cuda {

constexpr uint32_t kUnit = 8;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kWarpValues = kWarp * kUnit;
constexpr uint32_t kAllLanes = 0xffffffffu;

// How vectors are cut: vector v has the tiles [first_tile[v], first_tile[v + 1]).
struct Tiles {
  uint64_t first_tile[kMaxVectors + 1];
  uint64_t codes_at[kMaxVectors];  // of a code, as kernels/codec.h has it
  uint32_t block_bits;             // of the codec's block, which is 2^block_bits values
};

struct EncodeArguments {
  EncodeManyCall call;
  Tiles tiles;
};
struct DecodeArguments {
  DecodeManyCall call;
  Tiles tiles;
};

// The unit of this thread in a tile.
struct Unit {
  int32_t vector;
  uint64_t index;   // in the vector
  uint32_t values;  // that it has, 0 to kUnit

  uint64_t PYCOLL_DEVICE first() const { return index * kUnit; }
};

template <class Call>
PYCOLL_DEVICE Unit unit_of(const Call& call, const Tiles& tiles, uint64_t tile) {
  int32_t v = 0;
  while (tile >= tiles.first_tile[v + 1]) ++v;
  const uint64_t index = (tile - tiles.first_tile[v]) * blockDim.x + threadIdx.x;
  const uint64_t first = index * kUnit, count = call.vector[v].count;
  const uint64_t rest = count > first ? count - first : 0;
  return {v, index, rest < kUnit ? static_cast<uint32_t>(rest) : kUnit};
}

PYCOLL_DEVICE uint64_t units_of(uint64_t values) {
  return (values + kUnit - 1) / kUnit;
}

// ---- Values of a unit: 16 bytes at a time where they are all there and aligned. ----

template <class T>
PYCOLL_DEVICE void load_unit(const T* from, uint32_t n, T (&x)[kUnit]) {
  constexpr int kLength = device::Pack<T>::kLength;
  if (n == kUnit && device::is_aligned16(from)) {
#pragma unroll
    for (int part = 0; part < static_cast<int>(kUnit) / kLength; ++part) {
      const auto pack = device::load_pack(from + part * kLength);
#pragma unroll
      for (int k = 0; k < kLength; ++k) x[part * kLength + k] = pack.v[k];
    }
    return;
  }
#pragma unroll
  for (uint32_t k = 0; k < kUnit; ++k) x[k] = k < n ? from[k] : T{};
}

template <class T>
PYCOLL_DEVICE void store_unit(T* to, uint32_t n, const T (&x)[kUnit]) {
  constexpr int kLength = device::Pack<T>::kLength;
  if (n == kUnit && device::is_aligned16(to)) {
#pragma unroll
    for (int part = 0; part < static_cast<int>(kUnit) / kLength; ++part) {
      device::Pack<T> pack;
#pragma unroll
      for (int k = 0; k < kLength; ++k) pack.v[k] = x[part * kLength + k];
      device::store_pack(to + part * kLength, pack);
    }
    return;
  }
#pragma unroll
  for (uint32_t k = 0; k < kUnit; ++k) {
    if (k < n) to[k] = x[k];
  }
}

PYCOLL_DEVICE void load_values(DType dtype, const void* values, const Unit& unit,
                               float (&x)[kUnit]) {
  if (dtype == DType::float32) {
    return load_unit(static_cast<const float*>(values) + unit.first(), unit.values, x);
  }
  uint16_t bits[kUnit];
  load_unit(static_cast<const uint16_t*>(values) + unit.first(), unit.values, bits);
#pragma unroll
  for (uint32_t k = 0; k < kUnit; ++k) {
    x[k] = dtype == DType::float16 ? element::to_float32(element::Float16{bits[k]})
                                   : element::to_float32(element::BFloat16{bits[k]});
  }
}

PYCOLL_DEVICE void store_values(DType dtype, void* values, const Unit& unit,
                                const float (&x)[kUnit]) {
  if (dtype == DType::float32) {
    return store_unit(static_cast<float*>(values) + unit.first(), unit.values, x);
  }
  uint16_t bits[kUnit];
#pragma unroll
  for (uint32_t k = 0; k < kUnit; ++k) {
    bits[k] = dtype == DType::float16 ? element::round_to<element::Float16>(x[k]).bits
                                      : element::round_to<element::BFloat16>(x[k]).bits;
  }
  store_unit(static_cast<uint16_t*>(values) + unit.first(), unit.values, bits);
}

// The values of a vector to be encoded: with what its residual has kept.
PYCOLL_DEVICE void load_input(const EncodeManyCall& call, const Unit& unit, float (&x)[kUnit]) {
  const EncodeManyCall::Vector& vector = call.vector[unit.vector];
  load_values(call.dtype, vector.values, unit, x);
  if (vector.residual == nullptr) return;
  float residual[kUnit];
  load_unit(vector.residual + unit.first(), unit.values, residual);
#pragma unroll
  for (uint32_t k = 0; k < kUnit; ++k) x[k] = element::with_residual(x[k], residual[k]);
}

// ---- Codes of a unit. ----

template <int kBits>
struct PackedOf;
template <>
struct PackedOf<1> {
  using Type = uint8_t;
};
template <>
struct PackedOf<2> {
  using Type = uint16_t;
};
template <>
struct PackedOf<4> {
  using Type = uint32_t;
};
template <>
struct PackedOf<8> {
  using Type = uint64_t;
};
// Codes of a unit, the first in the lowest bits.
template <int kBits>
using Packed = typename PackedOf<kBits>::Type;

template <int kBits>
PYCOLL_DEVICE uint32_t code_in(Packed<kBits> packed, uint32_t k) {
  return static_cast<uint32_t>(packed >> (k * kBits)) & ((1u << kBits) - 1);
}

PYCOLL_DEVICE void clear(std::byte* code, uint64_t from, uint64_t to) {
  for (uint64_t i = from; i < to; ++i) code[i] = std::byte{0};
}
PYCOLL_DEVICE uint64_t round_up16(uint64_t bytes) {
  return (bytes + 15) & ~uint64_t{15};
}

}  // namespace pycoll::cuda
