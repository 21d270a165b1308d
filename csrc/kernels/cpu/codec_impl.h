// Whole vectors through a codec, tile by tile in the first-level cache. Compiled once an
// instruction set.
#pragma once

#include "kernels/cpu/codec_blocks.h"
#include "kernels/cpu/float_tiles.h"

namespace pycoll {
namespace {

// Tiles are whole blocks and whole groups of random numbers.
static_assert(kTile % element::kRandomGroup == 0 && kTileRoom % kMostBlock == 0);

PYCOLL_LOOP void add_residual(float* x, const float* residual, uint32_t n) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) x[i] = element::with_residual(x[i], residual[i]);
}

PYCOLL_LOOP void add(float* sum, const float* x, uint32_t n) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) sum[i] = sum[i] + x[i];
}

// The values of a tile in float32: where they are, or in `room`.
const float* tile_of(const EncodeRequest& request, size_t first, uint32_t n, Tile& room) {
  const bool as_they_are = is_float_array(request.dtype, request.values);
  if (as_they_are && request.residual == nullptr) {
    return static_cast<const float*>(request.values) + first;
  }
  load_tile(request.dtype, request.values, first, n, room.value);
  if (request.residual != nullptr) add_residual(room.value, request.residual + first, n);
  return room.value;
}

// A sum is divided, its NaN made the one NaN, and rounded to the type.
PYCOLL_LOOP void finish_tile(float* sum, uint32_t n, float divisor) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) sum[i] = element::only_nan(sum[i] / divisor);
}

// ---- Random numbers. ----

PYCOLL_LOOP void fill_groups(const element::RandomStream& stream, uint64_t group, uint32_t groups,
                             float* out) {
  for (uint32_t g = 0; g < groups; ++g, out += element::kRandomGroup) {
    const uint64_t counter = (group + g) * element::kRandomLanes;
    PYCOLL_INDEPENDENT
    for (uint32_t lane = 0; lane < element::kRandomLanes; ++lane) {
      const element::Words4 words = element::random_words(stream, counter + lane);
      out[lane] = element::uniform(words.word[0]);
      out[lane + 16] = element::uniform(words.word[1]);
      out[lane + 32] = element::uniform(words.word[2]);
      out[lane + 48] = element::uniform(words.word[3]);
    }
  }
}

void fill_uniform(const RandomKey& key, size_t first, uint32_t n, Tile& out) {
  const element::RandomStream stream{key.seed, key.step, key.rank};
  const uint64_t index = key.first + first;
  constexpr uint32_t kGroup = element::kRandomGroup;
  if (index % kGroup == 0) {
    fill_groups(stream, index / kGroup, (n + kGroup - 1) / kGroup, out.value);
  } else {
    for (uint32_t i = 0; i < n; ++i) out.value[i] = element::uniform_at(stream, index + i);
  }
}

// ---- Codecs of blocks. ----

constexpr size_t round_up(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// Where scales and codes of a vector are.
struct CodeLayout {
  uint32_t block;
  uint32_t bits;
  uint32_t scale_bytes;  // of a block
  size_t codes;          // where they begin

  CodeLayout(const Codec& codec, size_t n) {
    const CodecTraits& traits = traits_of(codec.kind);
    block = codec.block;
    bits = static_cast<uint32_t>(traits.bits);
    scale_bytes = static_cast<uint32_t>(traits.scales) * 4;
    codes = codes_at(codec, n);
  }
  size_t scale_at(size_t value) const { return value / block * scale_bytes; }
  size_t code_at(size_t value) const { return codes + value * bits / 8; }
  size_t code_end(size_t n) const { return codes + (n * bits + 7) / 8; }
};

void clear(std::byte* code, size_t from, size_t to) {
  __builtin_memset(code + from, 0, to - from);
}

PYCOLL_LOOP void keep_what_is_missing(const float* x, const float* decoded, uint32_t n,
                                      float* residual) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) residual[i] = x[i] - decoded[i];
}

void encode_tile(const EncodeRequest& request, const CodeLayout& layout, size_t first, uint32_t n,
                 const float* x, const float* u) {
  const BlockCodec& blocks = kBlockCodecs[static_cast<int>(request.codec.kind)];
  Tile decoded;
  for (uint32_t begin = 0; begin < n; begin += layout.block) {
    const uint32_t rest = n - begin, m = rest < layout.block ? rest : layout.block;
    std::byte* scales = request.code + layout.scale_at(first + begin);
    std::byte* codes = request.code + layout.code_at(first + begin);
    const bool finite =
        blocks.encode(x + begin, m, u == nullptr ? nullptr : u + begin, scales, codes);
    if (request.residual != nullptr && finite) {
      blocks.decode(scales, codes, m, decoded.value);
      keep_what_is_missing(x + begin, decoded.value, m, request.residual + first + begin);
    }
  }
}

void encode_blocks(const EncodeRequest& request) {
  const size_t n = request.count;
  const CodeLayout layout(request.codec, n);
  const uint32_t step = layout.block > kTile ? layout.block : kTile;
  const bool random = request.codec.stochastic || traits_of(request.codec.kind).always_stochastic;
  Tile room, numbers;
  for (size_t first = 0; first < n; first += step) {
    const auto m = static_cast<uint32_t>(n - first < step ? n - first : step);
    if (random) fill_uniform(request.key, first, m, numbers);
    encode_tile(request, layout, first, m, tile_of(request, first, m, room),
                random ? numbers.value : nullptr);
  }
  clear(request.code, layout.scale_at(n + layout.block - 1), layout.codes);
  clear(request.code, layout.code_end(n), round_up(layout.code_end(n)));
}

// Several codes are added block by block, while the sums are in the cache.
void decode_blocks(const DecodeRequest& request, const CodeLayout& layout, size_t first, uint32_t n,
                   float* out) {
  const BlockCodec& blocks = kBlockCodecs[static_cast<int>(request.codec.kind)];
  for (uint32_t begin = 0; begin < n; begin += layout.block) {
    const uint32_t rest = n - begin, m = rest < layout.block ? rest : layout.block;
    for (size_t k = 0; k < request.code_count; ++k) {
      const std::byte* code = request.codes[k];
      (k == 0 ? blocks.decode : blocks.add)(code + layout.scale_at(first + begin),
                                            code + layout.code_at(first + begin), m, out + begin);
    }
  }
}

// ---- fp16 and bf16: values one by one. ----

constexpr size_t kExponentBytes = 16;

// Of the magnitudes' bits, and of `largest`. Moved up by one exponent, what is not finite becomes
// negative, which a maximum of integers leaves out.
PYCOLL_LOOP uint32_t largest_finite(const float* x, uint32_t n, uint32_t largest) {
  constexpr uint32_t kMove = 0x80000000u - element::kNotFinite;
  auto most = static_cast<int32_t>(largest + kMove);
  for (uint32_t i = 0; i < n; ++i) {
    const auto moved = static_cast<int32_t>(element::magnitude_bits(x[i]) + kMove);
    most = moved > most ? moved : most;
  }
  return static_cast<uint32_t>(most) - kMove;
}

PYCOLL_LOOP void multiply(float* x, uint32_t n, float factor) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) x[i] = element::scaled(x[i], factor);
}

// Values that are not finite leave their residual as it is.
PYCOLL_LOOP void keep_what_is_missing_of_finite(const float* x, const float* decoded, uint32_t n,
                                                float* residual) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) {
    const bool finite = element::magnitude_bits(decoded[i]) < element::kNotFinite;
    const float missing = x[i] - decoded[i];
    residual[i] = finite ? missing : residual[i];
  }
}

// A finite value stays finite: the greatest may have been rounded up.
PYCOLL_LOOP void multiply_finite(float* x, uint32_t n, float factor) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) x[i] = element::product_within(x[i], factor);
}

template <typename Narrow>
void decode_narrow_tile(const std::byte* values, size_t first, uint32_t n, float factor,
                        float* out) {
  widen<Narrow, float>(out, values + first * sizeof(Narrow), n);
  if (factor != 1) multiply_finite(out, n, factor);
}

// With `values` of the code; returns the largest finite magnitude's bits.
template <typename Narrow>
uint32_t encode_narrow(const EncodeRequest& request, std::byte* values, int exponent) {
  Tile room, scaled;
  uint32_t largest = 0;
  for (size_t first = 0; first < request.count; first += kTile) {
    const size_t rest = request.count - first;
    const auto n = static_cast<uint32_t>(rest < kTile ? rest : kTile);
    const float* x = tile_of(request, first, n, room);
    largest = largest_finite(x, n, largest);
    const float* from = x;
    if (exponent != 0) {
      __builtin_memcpy(scaled.value, x, n * sizeof(float));
      multiply(scaled.value, n, element::power_of_two(-exponent));
      from = scaled.value;
    }
    finish<false, Narrow, float>(values + first * sizeof(Narrow), from, n, 1);
    if (request.residual != nullptr) {
      decode_narrow_tile<Narrow>(values, first, n, element::power_of_two(exponent), scaled.value);
      keep_what_is_missing_of_finite(x, scaled.value, n, request.residual + first);
    }
  }
  return largest;
}

uint32_t largest_of(const EncodeRequest& request) {
  Tile room;
  uint32_t largest = 0;
  for (size_t first = 0; first < request.count; first += kTile) {
    const size_t rest = request.count - first;
    const auto n = static_cast<uint32_t>(rest < kTile ? rest : kTile);
    largest = largest_finite(tile_of(request, first, n, room), n, largest);
  }
  return largest;
}

// Most vectors need no exponent: they are encoded while that is found out. With a residual it must
// be known before, since residuals change.
void encode_half(const EncodeRequest& request) {
  std::byte* values = request.code + kExponentBytes;
  int32_t exponent = 0;
  if (request.residual != nullptr) {
    exponent = element::half_exponent(largest_of(request));
    encode_narrow<Float16>(request, values, exponent);
  } else {
    exponent = element::half_exponent(encode_narrow<Float16>(request, values, 0));
    if (exponent != 0) encode_narrow<Float16>(request, values, exponent);
  }
  clear(request.code, 0, kExponentBytes);
  store<int32_t>(request.code, 0, exponent);
}

template <typename Narrow>
void decode_narrow(const DecodeRequest& request, size_t first, uint32_t n, float* out) {
  constexpr bool kHalf = std::is_same_v<Narrow, Float16>;
  Tile term;
  for (size_t k = 0; k < request.code_count; ++k) {
    const std::byte* code = request.codes[k];
    const float factor = kHalf ? element::half_factor(load<int32_t>(code, 0)) : 1;
    decode_narrow_tile<Narrow>(code + (kHalf ? kExponentBytes : 0), first, n, factor,
                               k == 0 ? out : term.value);
    if (k > 0) add(out, term.value, n);
  }
}

// ---- Any codec. ----

void encode(const EncodeRequest& request) {
  const size_t n = request.count;
  if (n == 0) return;
  if (request.codec.kind == CodecKind::fp16) {
    encode_half(request);
  } else if (request.codec.kind == CodecKind::bf16) {
    encode_narrow<BFloat16>(request, request.code, 0);
  } else {
    return encode_blocks(request);
  }
  const size_t end = n * 2 + (request.codec.kind == CodecKind::fp16 ? kExponentBytes : 0);
  clear(request.code, end, round_up(end));
}

void decode(const DecodeRequest& request) {
  const CodecKind kind = request.codec.kind;
  const CodeLayout layout(request.codec, request.count);
  const uint32_t step = layout.block > kTile ? layout.block : kTile;
  const bool in_place = is_float_array(request.dtype, request.values);
  // A block that is not finite decodes as the one NaN.
  const bool finished =
      traits_of(kind).scales > 0 && request.code_count == 1 && request.divisor == 1;
  Tile room;
  for (size_t first = 0; first < request.count; first += step) {
    const size_t rest = request.count - first;
    const auto n = static_cast<uint32_t>(rest < step ? rest : step);
    float* out = in_place ? static_cast<float*>(request.values) + first : room.value;
    if (kind == CodecKind::fp16) {
      decode_narrow<Float16>(request, first, n, out);
    } else if (kind == CodecKind::bf16) {
      decode_narrow<BFloat16>(request, first, n, out);
    } else {
      decode_blocks(request, layout, first, n, out);
    }
    if (!finished) finish_tile(out, n, request.divisor);
    if (!in_place) store_tile(request.dtype, out, request.values, first, n);
  }
}

constexpr CodecKernels kCodecKernels = {encode, decode};

}  // namespace
}  // namespace pycoll
