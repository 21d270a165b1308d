// Kernels of the codecs of kernels/codec.h. The maths is that of the CPU (codec_element.h,
// random_numbers.h, float_formats.h), and so is the order of sums, so codes and values are the
// CPU's to the byte (nvcc -fmad=false, no fast math).
//
// A thread has a *unit*: eight values, a whole number of bytes of any code, in registers from their
// load to their code. A block of threads has a tile: whole codec blocks, but at the end of a
// vector. Codec blocks of up to 256 values are one warp's. Units and values beyond the end of a
// vector are zeros, which changes no largest magnitude and no sum.
#pragma once

#include "kernels/cuda/codec_team.cuh"

namespace pycoll::cuda {

// ---- Encoding of blocks. ----

template <class C, bool kRandom>
class BlockEncoder {
 public:
  PYCOLL_DEVICE BlockEncoder(const EncodeArguments& in, float* room)
      : call_(in.call), tiles_(in.tiles), team_(in.tiles.block_bits, room) {}

  PYCOLL_DEVICE void run(uint64_t tile) {
    const Unit unit = unit_of(call_, tiles_, tile);
    float x[kUnit];
    load_input(call_, unit, x);
    BlockFacts facts{};
    const element::BlockClass which = find_facts(unit, x, facts);
    element::Scales scales{};
    if (which == element::BlockClass::finite) scales = C::scales_of(facts);
    if (which == element::BlockClass::not_finite) scales = {element::kQuietNan, element::kQuietNan};
    float u[kUnit];
    if constexpr (kRandom) find_numbers(unit, u);
    if (unit.values == 0) return;
    const Packed<C::bits> packed =
        which == element::BlockClass::finite ? pack(x, u, unit.values, scales) : 0;
    store(unit, packed, scales);
    const bool keeps = call_.vector[unit.vector].residual != nullptr;
    if (keeps && which != element::BlockClass::not_finite) keep(unit, x, packed, scales);
  }

 private:
  using BlockFacts = element::BlockFacts;

  // Values of this unit's block, of which the last may have fewer.
  PYCOLL_DEVICE uint32_t values_of_block(const Unit& unit) const {
    const uint64_t block = uint64_t{1} << tiles_.block_bits;
    const uint64_t first = unit.first() & ~(block - 1), count = call_.vector[unit.vector].count;
    const uint64_t rest = count > first ? count - first : 1;
    return static_cast<uint32_t>(rest < block ? rest : block);
  }

  PYCOLL_DEVICE element::BlockClass find_facts(const Unit& unit, const float (&x)[kUnit],
                                               BlockFacts& facts) {
    uint32_t magnitude = 0;
    if constexpr (C::scales == 2) {
      find_range(unit, x, facts);
      const uint32_t least = element::magnitude_bits(facts.least);
      const uint32_t most = element::magnitude_bits(facts.most);
      magnitude = least > most ? least : most;
    } else {
      int32_t largest[1] = {0};
#pragma unroll
      for (uint32_t k = 0; k < kUnit; ++k) {
        const auto bits = static_cast<int32_t>(element::magnitude_bits(x[k]));
        largest[0] = bits > largest[0] ? bits : largest[0];
      }
      team_.most(largest);
      magnitude = static_cast<uint32_t>(largest[0]);
    }
    const float largest = facts.largest = element::bits_as<float>(magnitude);
    facts.count = values_of_block(unit);
    if constexpr (C::bits == 1) {
      facts.mean = element::mean_of(team_.sum(x, element::mean_term), facts.count);
    }
    if constexpr (C::bits == 2) {
      const auto term = [largest](float v) { return element::square_term(v, largest); };
      facts.mean_square =
          team_.sum(x, term) / static_cast<float>(static_cast<int32_t>(facts.count));
    }
    return element::class_of(magnitude);
  }

  // The greatest key, and the greatest of the keys' complements. NaN have the keys at the ends.
  PYCOLL_DEVICE void find_range(const Unit& unit, const float (&x)[kUnit], BlockFacts& facts) {
    int32_t ends[2] = {INT32_MIN, INT32_MIN};
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) {
      const int32_t key = element::order_key(element::bits_as<int32_t>(x[k]));
      if (k >= unit.values) continue;
      ends[0] = key > ends[0] ? key : ends[0];
      ends[1] = ~key > ends[1] ? ~key : ends[1];
    }
    team_.most(ends);
    facts.most = element::bits_as<float>(element::order_key(ends[0]));
    facts.least = element::bits_as<float>(element::order_key(~ends[1]));
  }

  PYCOLL_DEVICE void find_numbers(const Unit& unit, float (&u)[kUnit]) const {
    const RandomKey& key = call_.key;
    const uint64_t warp_first = (unit.index - threadIdx.x % kWarp) * kUnit;
    const uint64_t index = key.first + call_.vector[unit.vector].first + warp_first;
    team_.numbers({key.seed, key.step, key.rank}, index, u);
  }

  PYCOLL_DEVICE Packed<C::bits> pack(const float (&x)[kUnit], const float (&u)[kUnit], uint32_t n,
                                     const element::Scales& scales) const {
    Packed<C::bits> packed = 0;
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) {
      uint32_t code;
      if constexpr (kRandom) {
        code = C::encode(x[k], scales, u[k]);
      } else {
        code = C::encode(x[k], scales);
      }
      code = k < n ? code : 0;
      packed = static_cast<Packed<C::bits>>(
          packed | Packed<C::bits>{static_cast<Packed<C::bits>>(code)} << (k * C::bits));
    }
    return packed;
  }

  // Codes, and the scales and the zeros behind them where they are this thread's to write.
  PYCOLL_DEVICE void store(const Unit& unit, Packed<C::bits> packed,
                           const element::Scales& scales) const {
    const EncodeManyCall::Vector& vector = call_.vector[unit.vector];
    const uint64_t codes_at = tiles_.codes_at[unit.vector], units = units_of(vector.count);
    std::byte* const codes = vector.code + codes_at;
    reinterpret_cast<Packed<C::bits>*>(codes)[unit.index] = packed;
    if (unit.index == units - 1) clear(codes, units * C::bits, round_up16(units * C::bits));
    const uint32_t unit_bits = tiles_.block_bits - 3;
    if ((unit.index & ((uint64_t{1} << unit_bits) - 1)) != 0) return;
    const uint64_t block = unit.index >> unit_bits, last = (units - 1) >> unit_bits;
    auto* const to = reinterpret_cast<float*>(vector.code) + block * C::scales;
    to[0] = scales.first;
    if constexpr (C::scales == 2) to[1] = scales.second;
    if (block == last) clear(vector.code, (last + 1) * C::scales * sizeof(float), codes_at);
  }

  PYCOLL_DEVICE void keep(const Unit& unit, const float (&x)[kUnit], Packed<C::bits> packed,
                          const element::Scales& scales) const {
    float missing[kUnit];
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) {
      missing[k] = x[k] - C::decode(code_in<C::bits>(packed, k), scales);
    }
    store_unit(call_.vector[unit.vector].residual + unit.first(), unit.values, missing);
  }

  const EncodeManyCall& call_;
  const Tiles& tiles_;
  BlockTeam team_;
};

// Two blocks of threads a multiprocessor, but for Ternary, which divides twice: on sm_100 it would
// need more than 64 registers for that.
template <class C, bool kRandom>
__global__ void __launch_bounds__(kMaxThreads, C::bits == 2 ? 1 : 2)
    encode_blocks_kernel(PYCOLL_GRID_CONSTANT EncodeArguments in) {
  PYCOLL_DYNAMIC_SHARED(float, room);
  BlockEncoder<C, kRandom> encoder(in, room);
  const uint64_t tiles = in.tiles.first_tile[in.call.vectors];
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) encoder.run(tile);
}

// ---- Encoding of fp16 and bf16. ----

// What a kernel does for fp16, whose exponent is known when all values have been looked at: the
// first encodes as if it were 0, and looks, which with a residual is all that it does; the second
// encodes again where that was wrong. The exponent in the code is the greatest that any warp needs.
enum class Pass : int32_t { only, first, second };

template <class Narrow>
class NarrowEncoder {
 public:
  PYCOLL_DEVICE NarrowEncoder(const EncodeArguments& in, Pass pass)
      : call_(in.call), tiles_(in.tiles), pass_(pass) {}

  PYCOLL_DEVICE void run(uint64_t tile) const {
    const Unit unit = unit_of(call_, tiles_, tile);
    const EncodeManyCall::Vector& vector = call_.vector[unit.vector];
    const bool keeps = vector.residual != nullptr;
    int32_t exponent = 0;
    if (pass_ == Pass::second) {
      exponent = *reinterpret_cast<const int32_t*>(vector.code);
      if (exponent == 0 && !keeps) return;
    }
    float x[kUnit];
    load_input(call_, unit, x);
    if (pass_ == Pass::first) look(x, vector.code);
    if (unit.values == 0 || (pass_ == Pass::first && keeps)) return;
    encode(unit, x, exponent);
  }

 private:
  PYCOLL_DEVICE static void look(const float (&x)[kUnit], std::byte* code) {
    int32_t exponent = 0;
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) {
      const uint32_t magnitude = element::magnitude_bits(x[k]);
      const int32_t own = magnitude < element::kNotFinite ? element::half_exponent(magnitude) : 0;
      exponent = own > exponent ? own : exponent;
    }
    for (int by = kWarp / 2; by > 0; by /= 2) {
      const int32_t other = __shfl_xor_sync(kAllLanes, exponent, by);
      exponent = other > exponent ? other : exponent;
    }
    if (exponent == 0 || threadIdx.x % kWarp != 0) return;
    using device::Scope;
    device::fetch_max_relaxed<Scope::device>(reinterpret_cast<uint32_t*>(code),
                                             static_cast<uint32_t>(exponent));
  }

  PYCOLL_DEVICE void encode(const Unit& unit, const float (&x)[kUnit], int32_t exponent) const {
    const EncodeManyCall::Vector& vector = call_.vector[unit.vector];
    const float down = element::power_of_two(-exponent), up = element::power_of_two(exponent);
    uint16_t bits[kUnit];
    float missing[kUnit];
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) {
      const auto narrow = element::round_to<Narrow>(element::scaled(x[k], down));
      bits[k] = k < unit.values ? narrow.bits : 0;
      const float decoded = element::product_within(element::to_float32(narrow), up);
      missing[k] = x[k] - decoded;
    }
    auto* const codes = reinterpret_cast<uint16_t*>(vector.code + tiles_.codes_at[unit.vector]);
    // The zeros behind the last are a part of the code.
    store_unit(codes + unit.first(), kUnit, bits);
    if (vector.residual != nullptr) keep(unit, bits, missing);
  }

  // Of values that are not finite the residual stays as it is.
  PYCOLL_DEVICE void keep(const Unit& unit, const uint16_t (&bits)[kUnit],
                          float (&missing)[kUnit]) const {
    float* const residual = call_.vector[unit.vector].residual + unit.first();
    float before[kUnit];
    load_unit(residual, unit.values, before);
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) {
      const float value = element::to_float32(Narrow{bits[k]});
      const bool finite = element::magnitude_bits(value) < element::kNotFinite;
      missing[k] = finite ? missing[k] : before[k];
    }
    store_unit(residual, unit.values, missing);
  }

  const EncodeManyCall& call_;
  const Tiles& tiles_;
  Pass pass_;
};

template <class Narrow>
__global__ void __launch_bounds__(kMaxThreads, 2)
    encode_narrow_kernel(PYCOLL_GRID_CONSTANT EncodeArguments in, Pass pass) {
  const NarrowEncoder<Narrow> encoder(in, pass);
  const uint64_t tiles = in.tiles.first_tile[in.call.vectors];
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) encoder.run(tile);
}

// The exponents of fp16 begin as 0. One block; vectors have a thread each.
__global__ void __launch_bounds__(kMaxThreads, 1)
    clear_exponents_kernel(PYCOLL_GRID_CONSTANT EncodeArguments in) {
  const auto v = static_cast<int32_t>(threadIdx.x);
  if (v >= in.call.vectors || in.call.vector[v].count == 0) return;
  device::store_pack(reinterpret_cast<uint32_t*>(in.call.vector[v].code), device::Pack<uint32_t>{});
}

// ---- Decoding. ----

// The values of one unit of a code, of each codec.
template <class C>
struct BlockDecoder {
  // Whole units can be read: codes are padded.
  static PYCOLL_DEVICE void decode(const std::byte* code, uint64_t codes_at, uint32_t block_bits,
                                   uint64_t unit, float (&x)[kUnit]) {
    const auto* scale =
        reinterpret_cast<const float*>(code) + (unit >> (block_bits - 3)) * C::scales;
    element::Scales scales{scale[0], 0};
    if constexpr (C::scales == 2) scales.second = scale[1];
    const auto packed = reinterpret_cast<const Packed<C::bits>*>(code + codes_at)[unit];
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) x[k] = C::decode(code_in<C::bits>(packed, k), scales);
  }
};

template <class Narrow>
struct NarrowDecoder {
  static PYCOLL_DEVICE void decode(const std::byte* code, uint64_t codes_at, uint32_t,
                                   uint64_t unit, float (&x)[kUnit]) {
    float factor = 1;
    if constexpr (std::is_same_v<Narrow, element::Float16>) {
      factor = element::half_factor(*reinterpret_cast<const int32_t*>(code));
    }
    uint16_t bits[kUnit];
    load_unit(reinterpret_cast<const uint16_t*>(code + codes_at) + unit * kUnit, kUnit, bits);
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) {
      x[k] = element::product_within(element::to_float32(Narrow{bits[k]}), factor);
    }
  }
};

template <class Decoder>
PYCOLL_DEVICE void decode_tile(const DecodeArguments& in, uint64_t tile) {
  const DecodeManyCall& call = in.call;
  const Unit unit = unit_of(call, in.tiles, tile);
  if (unit.values == 0) return;
  const uint64_t codes_at = in.tiles.codes_at[unit.vector];
  const std::byte* const* const code = call.code + unit.vector * call.codes;
  float sum[kUnit];
  Decoder::decode(code[0], codes_at, in.tiles.block_bits, unit.index, sum);
#pragma unroll 2
  for (int32_t i = 1; i < call.codes; ++i) {
    float x[kUnit];
    Decoder::decode(code[i], codes_at, in.tiles.block_bits, unit.index, x);
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) sum[k] = sum[k] + x[k];
  }
#pragma unroll
  for (uint32_t k = 0; k < kUnit; ++k) {
    if (call.divisor != 1) sum[k] = sum[k] / call.divisor;
    sum[k] = element::only_nan(sum[k]);
  }
  store_values(call.dtype, call.vector[unit.vector].values, unit, sum);
}

template <class Decoder>
__global__ void __launch_bounds__(kMaxThreads, 2)
    decode_kernel(PYCOLL_GRID_CONSTANT DecodeArguments in) {
  const uint64_t tiles = in.tiles.first_tile[in.call.vectors];
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) decode_tile<Decoder>(in, tile);
}

}  // namespace pycoll::cuda
