// One block of a codec: facts, scales, codes, and back. Loops that compilers vectorise; a value has
// a byte on the stack until codes are packed. As in reduce_loops.h, nothing with external linkage.
#pragma once

#include "kernels/codec.h"
#include "kernels/codec_element.h"
#include "kernels/cpu/reduce_loops.h"
#include "kernels/random_numbers.h"

namespace pycoll {
namespace {

using element::BlockClass;
using element::BlockFacts;
using element::Scales;

// Codes of one byte each, and room to fill the last packed byte with zeros.
struct Codes {
  alignas(64) uint8_t code[kMostBlock + 8];
};

// ---- Facts. ----

PYCOLL_HD uint32_t largest_magnitude(const float* x, uint32_t n) {
  uint32_t largest = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t magnitude = element::magnitude_bits(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

PYCOLL_HD void find_range(const float* x, uint32_t n, BlockFacts& facts) {
  // Keys of integers: minima of floats are not vectorised, for NaN and signed zeros.
  int32_t least = INT32_MAX, most = INT32_MIN;
  for (uint32_t i = 0; i < n; ++i) {
    const int32_t key = element::order_key(element::bits_as<int32_t>(x[i]));
    least = key < least ? key : least;
    most = key > most ? key : most;
  }
  facts.least = element::bits_as<float>(element::order_key(least));
  facts.most = element::bits_as<float>(element::order_key(most));
}

// The sum that codec_element.h describes, of term(x[i]).
template <typename Term>
PYCOLL_HD float sum_in_lanes(const float* x, uint32_t n, const Term& term) {
  constexpr uint32_t kLanes = element::kSumLanes;
  alignas(64) float sums[kLanes] = {};
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) sums[lane] += term(x[i + lane]);
  }
  for (uint32_t lane = 0; i + lane < n; ++lane) sums[lane] += term(x[i + lane]);
  for (uint32_t half = kLanes / 2; half > 0; half /= 2) {
    for (uint32_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

template <typename C>
PYCOLL_HD BlockFacts facts_of(const float* x, uint32_t n, uint32_t magnitude) {
  BlockFacts facts{};
  facts.count = n;
  facts.largest = element::bits_as<float>(magnitude);
  if constexpr (C::scales == 2) find_range(x, n, facts);
  if constexpr (C::bits == 1) {
    facts.mean = element::mean_of(sum_in_lanes(x, n, element::mean_term), n);
  }
  if constexpr (C::bits == 2) {
    const float largest = facts.largest;
    const auto term = [largest](float v) { return element::square_term(v, largest); };
    facts.mean_square = sum_in_lanes(x, n, term) / static_cast<float>(static_cast<int32_t>(n));
  }
  return facts;
}

// ---- Packing: of code[0, n) to n * kBits / 8 bytes, rounded up, and back. ----

template <int kBits>
PYCOLL_HD void pack(Codes& codes, uint32_t n, std::byte* out) {
  static_assert(kBits == 1 || kBits == 2 || kBits == 4);
  for (uint32_t i = n; i < n + 7; ++i) codes.code[i] = 0;
  constexpr uint32_t kEach = 8 / kBits;
  const uint32_t bytes = (n + kEach - 1) / kEach;
  PYCOLL_INDEPENDENT
  for (uint32_t k = 0; k < bytes; ++k) {
    uint32_t packed;
    if constexpr (kBits == 4) {
      const auto pair = load<uint16_t>(codes.code, k);
      packed = uint32_t{pair} | uint32_t{pair} >> 4;
    } else if constexpr (kBits == 2) {
      const auto four = load<uint32_t>(codes.code, k);
      packed = four | four >> 6 | four >> 12 | four >> 18;
    } else {
      // Bit 0 of byte j goes to bit 56 + j: no two of the sums meet.
      packed = static_cast<uint32_t>((load<uint64_t>(codes.code, k) * 0x0102040810204080u) >> 56);
    }
    store<uint8_t>(out, k, static_cast<uint8_t>(packed));
  }
}

template <int kBits>
PYCOLL_HD void unpack(const std::byte* packed, uint32_t n, Codes& codes) {
  constexpr uint32_t kEach = 8 / kBits;
  const uint32_t bytes = (n + kEach - 1) / kEach;
  PYCOLL_INDEPENDENT
  for (uint32_t k = 0; k < bytes; ++k) {
    const auto byte = load<uint8_t>(packed, k);
    if constexpr (kBits == 4) {
      store<uint16_t>(codes.code, k, static_cast<uint16_t>((byte & 0xfu) | (byte & 0xf0u) << 4));
    } else if constexpr (kBits == 2) {
      const uint32_t four = byte | byte << 6 | byte << 12 | byte << 18;
      store<uint32_t>(codes.code, k, four & 0x03030303u);
    } else {
      const uint64_t copies = uint64_t{byte} * 0x0101010101010101u;
      // Byte j has bit j or nothing: Sign asks only which.
      store<uint64_t>(codes.code, k, copies & 0x8040201008040201u);
    }
  }
}

// ---- Blocks. ----

template <typename C>
PYCOLL_HD void encode_values(const float* x, uint32_t n, const Scales& s, const float* u,
                             uint8_t* code) {
  if constexpr (C::stochastic) {
    if (u != nullptr) {
      PYCOLL_INDEPENDENT
      for (uint32_t i = 0; i < n; ++i) code[i] = static_cast<uint8_t>(C::encode(x[i], s, u[i]));
      return;
    }
  }
  if constexpr (C::bits != 2) {
    PYCOLL_INDEPENDENT
    for (uint32_t i = 0; i < n; ++i) code[i] = static_cast<uint8_t>(C::encode(x[i], s));
  }
}

// `u`: n numbers for stochastic rounding, or nullptr. False: the block is not finite.
template <typename C>
PYCOLL_LOOP bool encode_block(const float* x, uint32_t n, const float* u, std::byte* scales,
                              std::byte* codes) {
  const uint32_t magnitude = largest_magnitude(x, n);
  const BlockClass which = element::class_of(magnitude);
  Scales s{};
  if (which == BlockClass::finite) {
    s = C::scales_of(facts_of<C>(x, n, magnitude));
    if constexpr (C::bits == 8) {
      encode_values<C>(x, n, s, u, reinterpret_cast<uint8_t*>(codes));
    } else {
      Codes unpacked;
      encode_values<C>(x, n, s, u, unpacked.code);
      pack<C::bits>(unpacked, n, codes);
    }
  } else {
    if (which == BlockClass::not_finite) s = {element::kQuietNan, element::kQuietNan};
    __builtin_memset(codes, 0, (n * C::bits + 7) / 8);
  }
  store<float>(scales, 0, s.first);
  if constexpr (C::scales == 2) store<float>(scales, 1, s.second);
  return which != BlockClass::not_finite;
}

template <typename C, bool kAdd>
PYCOLL_LOOP void decode_block(const std::byte* scales, const std::byte* codes, uint32_t n,
                              float* out) {
  Scales s{load<float>(scales, 0), 0};
  if constexpr (C::scales == 2) s.second = load<float>(scales, 1);
  Codes unpacked;
  const uint8_t* code = unpacked.code;
  if constexpr (C::bits == 8) {
    code = reinterpret_cast<const uint8_t*>(codes);
  } else {
    unpack<C::bits>(codes, n, unpacked);
  }
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) {
    const float value = C::decode(code[i], s);
    out[i] = kAdd ? out[i] + value : value;
  }
}

struct BlockCodec {
  bool (*encode)(const float* x, uint32_t n, const float* u, std::byte* scales, std::byte* codes);
  void (*decode)(const std::byte* scales, const std::byte* codes, uint32_t n, float* out);
  void (*add)(const std::byte* scales, const std::byte* codes, uint32_t n, float* out);
};

template <typename C>
constexpr BlockCodec block_codec = {encode_block<C>, decode_block<C, false>, decode_block<C, true>};

// Index by CodecKind; fp16 and bf16 have no blocks.
constexpr BlockCodec kBlockCodecs[] = {
    {},
    {},
    block_codec<element::ScaledFloat8<element::Float8E4M3>>,
    block_codec<element::ScaledFloat8<element::Float8E5M2>>,
    block_codec<element::SymmetricInteger<8>>,
    block_codec<element::SymmetricInteger<4>>,
    block_codec<element::MinMax<8>>,
    block_codec<element::MinMax<4>>,
    block_codec<element::Sign>,
    block_codec<element::Ternary>,
};
static_assert(sizeof(kBlockCodecs) / sizeof(kBlockCodecs[0]) ==
              static_cast<size_t>(CodecKind::kCount));

}  // namespace
}  // namespace pycoll
