// The kernels of codecs: codes, residuals and values are those of the CPU, byte for byte.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "device_batch.h"
#include "kernels/codec.h"
#include "kernels/codec_element.h"

namespace pycoll::sim::tests {
namespace {

constexpr std::array kFloats{DType::float32, DType::float16, DType::bfloat16};
constexpr auto kKinds = static_cast<uint64_t>(CodecKind::kCount);
constexpr uint32_t kBlocks = 8;  // 32, 64, ..., 4096

// ---- Values. ----

enum class Range { ordinary, wide, any_bits, zeros, constant, huge, tiny, kCount };

float draw_value(Range range, float constant, Rng& rng) {
  const auto uniform = static_cast<float>(rng.below(1 << 24)) * 0x1p-23f - 1;
  switch (range) {
    case Range::ordinary:
      return uniform * 3;
    case Range::wide:
      return std::ldexp(uniform, static_cast<int>(rng.below(60)) - 30);
    case Range::any_bits:
      return element::bits_as<float>(static_cast<uint32_t>(rng.next()));
    case Range::zeros:
      return rng.one_in(2) ? 0.0f : -0.0f;
    case Range::constant:
      return constant;
    case Range::huge:
      return uniform * element::kLargest;
    case Range::tiny:  // about the least magnitude of a block, and subnormal
      return rng.one_in(2) ? uniform * 3e-30f : uniform * 1e-38f;
    case Range::kCount:
      break;
  }
  return 0;
}

float draw_special(Rng& rng) {
  constexpr std::array kSpecial{0.0f,           -0.0f,    1e-45f,   -1e-45f,    1e-30f,
                                9e-31f,         65519.0f, 65520.0f, -131039.0f, 3e38f,
                                -3.4028235e38f, INFINITY, -INFINITY};
  const uint64_t i = rng.below(kSpecial.size() + 2);
  if (i < kSpecial.size()) return kSpecial[i];
  // NaN with a sign and a payload, signaling or quiet.
  return element::bits_as<float>(static_cast<uint32_t>(rng.next()) | 0x7f800001u);
}

// Of float32, and rounded to the type.
Bytes draw_values(DType dtype, uint64_t count, Rng& rng) {
  Bytes bytes(count * size_of(dtype));
  const auto range = static_cast<Range>(rng.below(static_cast<uint64_t>(Range::kCount)));
  const float constant = draw_value(Range::wide, 0, rng);
  const bool has_specials = rng.one_in(3);
  for (uint64_t i = 0; i < count; ++i) {
    float x = draw_value(range, constant, rng);
    if (has_specials && rng.one_in(200)) x = draw_special(rng);
    const uint16_t half = dtype == DType::float16 ? element::round_to<element::Float16>(x).bits
                                                  : element::round_to<element::BFloat16>(x).bits;
    const void* from = dtype == DType::float32 ? static_cast<const void*>(&x) : &half;
    std::memcpy(bytes.data() + i * size_of(dtype), from, size_of(dtype));
  }
  return bytes;
}

// ---- Cases. ----

Codec draw_codec(uint64_t index, Rng& rng) {
  Codec codec;
  codec.kind = static_cast<CodecKind>(index % kKinds);
  codec.block = kLeastBlock << (index / kKinds % kBlocks);
  codec.stochastic = traits_of(codec.kind).may_be_stochastic && rng.one_in(2);
  return codec;
}

// Next to a multiple of the block, or of any size. Under ThreadSanitizer without the blocks of 512
// threads.
uint64_t draw_count(const Codec& codec, uint64_t index, Rng& rng) {
  const uint64_t odd = rng.below(3);
  uint64_t count = rng.below(4) * codec.block;
  count = count + odd > 0 ? count + odd - 1 : 0;
  if (rng.one_in(2)) count = size_of_case(index + rng.below(kSizes));
  return kFewThreads && codec.block > 2048 ? std::min<uint64_t>(count, 2048) : count;
}

uint64_t draw_offset(Rng& rng) {
  return rng.one_in(2) ? 0 : rng.below(9);
}

std::string words_for(const Codec& codec, DType dtype, uint64_t count) {
  return std::string(name_of(codec.kind)) + (codec.stochastic ? " stochastic" : "") + ", block " +
         std::to_string(codec.block) + ", " + std::to_string(count) + " of " +
         std::string(name_of(dtype));
}

RandomKey draw_key(Rng& rng) {
  RandomKey key{rng.next(), static_cast<uint32_t>(rng.next()), static_cast<uint32_t>(rng.next()),
                rng.below(1 << 20)};
  // Where random numbers begin with a group of them, sixteen threads have its counters.
  if (!rng.one_in(3)) key.first = key.first * 64;
  return key;
}

Options options_for(const Settings& settings, Rng& rng) {
  Settings some = settings;
  some.max_resident = kFewThreads ? 1 : static_cast<unsigned>(rng.below(4));
  return some.options();
}

// One vector that is encoded on both sides.
class Encoding {
 public:
  Encoding(const Codec& codec, const RandomKey& key, DType dtype, uint64_t count, Rng& rng)
      : codec_(codec),
        key_(key),
        dtype_(dtype),
        count_(count),
        contents_(draw_values(dtype, count, rng)),
        values_(contents_.size(), draw_offset(rng) * size_of(dtype)),
        code_(code_bytes(codec, count)),
        residual_(count * sizeof(float), draw_offset(rng) * sizeof(float)) {
    values_.fill(contents_);
    if (rng.one_in(2)) {
      before_ = draw_values(DType::float32, count, rng);
      residual_.fill(before_);
      has_residual_ = true;
    }
    first_ = rng.one_in(2) ? 0 : rng.below(1000) * 64;
  }

  cuda::EncodeManyCall::Vector vector() const {
    return {values_.data(), count_, code_.data(), has_residual_ ? residual_of(residual_) : nullptr,
            first_};
  }

  void check_all() const {
    Bytes code(code_.size(), std::byte{0x5a});
    Buffer residual(residual_.size());
    residual.fill(before_);
    EncodeRequest request{codec_, key_, dtype_, values_.data(), count_, code.data()};
    request.key.first += first_;
    if (has_residual_) request.residual = residual_of(residual);
    codec_kernels(Isa::baseline).encode(request);
    const std::string what = words_for(codec_, dtype_, count_);
    compare(DType::uint8, code_.contents(), code, what + ", code");
    compare(dtype_, values_.contents(), contents_, what + ", values, which are read only");
    if (has_residual_) {
      compare(DType::float32, residual_.contents(), residual.contents(), what + ", residual");
    }
  }

 private:
  static float* residual_of(const Buffer& buffer) {
    return reinterpret_cast<float*>(buffer.data());
  }
  static void compare(DType dtype, const Bytes& got, const Bytes& expected,
                      const std::string& what) {
    const std::string differs = difference(dtype, got, expected);
    check(differs.empty(), what + ": " + differs);
  }

  Codec codec_;
  RandomKey key_;
  DType dtype_;
  uint64_t count_;
  Bytes contents_;
  Bytes before_;
  Buffer values_;
  Buffer code_;
  Buffer residual_;
  bool has_residual_ = false;
  uint64_t first_ = 0;
};

void check_encode(const Settings& settings, uint64_t index, Rng& rng) {
  DeviceGroup group(small_geometry(1), options_for(settings, rng));
  const Codec codec = draw_codec(index, rng);
  const RandomKey key = draw_key(rng);
  const DType dtype = kFloats[rng.below(kFloats.size())];
  cuda::EncodeManyCall call{codec, key, dtype};
  call.vectors = rng.one_in(2) ? 1 : static_cast<int32_t>(rng.below(5));
  // Blocks of threads that have several tiles.
  call.blocks = static_cast<int32_t>(rng.below(3));
  std::vector<std::unique_ptr<Encoding>> encodings;
  for (int32_t v = 0; v < call.vectors; ++v) {
    const uint64_t count = draw_count(codec, index, rng);
    encodings.push_back(std::make_unique<Encoding>(codec, key, dtype, count, rng));
    call.vector[v] = encodings.back()->vector();
  }
  check(cuda::encode_many(call, group.stream(0)) == cudaSuccess, "launch of encode_many");
  group.run();
  for (const auto& encoding : encodings) encoding->check_all();
}

// A code of other values, or, now and then, bytes that nobody has encoded.
Bytes draw_code(const Codec& codec, uint64_t count, Rng& rng) {
  Bytes code(code_bytes(codec, count));
  const Bytes values = draw_values(DType::float32, count, rng);
  const EncodeRequest request{codec,         draw_key(rng), DType::float32,
                              values.data(), count,         code.data()};
  codec_kernels(Isa::baseline).encode(request);
  return code;
}

void check_decode(const Settings& settings, uint64_t index, Rng& rng) {
  DeviceGroup group(small_geometry(1), options_for(settings, rng));
  constexpr std::array<float, 4> kDivisors{1, 1, 3, 8};
  cuda::DecodeManyCall call;
  call.codec = draw_codec(index, rng);
  call.dtype = kFloats[rng.below(kFloats.size())];
  call.divisor = kDivisors[rng.below(kDivisors.size())];
  call.vectors = static_cast<int32_t>(rng.below(4));
  call.codes = 1 + static_cast<int32_t>(rng.below(5));
  call.blocks = static_cast<int32_t>(rng.below(3));
  std::vector<Buffer> values, codes;
  std::vector<Bytes> expected;
  for (int32_t v = 0; v < call.vectors; ++v) {
    const uint64_t count = draw_count(call.codec, index, rng);
    const std::byte** const of_vector = call.code + v * call.codes;
    for (int32_t k = 0; k < call.codes; ++k) {
      const Bytes code = draw_code(call.codec, count, rng);
      codes.emplace_back(code.size()).fill(code);
      of_vector[k] = codes.back().data();
    }
    const size_t size = size_of(call.dtype);
    values.emplace_back(count * size, draw_offset(rng) * size);
    call.vector[v] = {values.back().data(), count};
    expected.emplace_back(count * size);
    codec_kernels(Isa::baseline)
        .decode({call.codec, of_vector, static_cast<size_t>(call.codes), call.dtype,
                 expected.back().data(), count, call.divisor});
  }
  check(cuda::decode_many(call, group.stream(0)) == cudaSuccess, "launch of decode_many");
  group.run();
  for (size_t v = 0; v < values.size(); ++v) {
    const std::string differs = difference(call.dtype, values[v].contents(), expected[v]);
    check(differs.empty(), "sum of " + std::to_string(call.codes) + " codes of " +
                               words_for(call.codec, call.dtype, call.vector[v].count) + ": " +
                               differs);
  }
}

// What cannot be is refused, and nothing is launched.
template <class Call>
void check_refused(cudaError_t (*launch)(const Call&, cudaStream_t), Call call,
                   void (*spoil)(Call&), const char* what) {
  DeviceGroup group(small_geometry(1), {});
  spoil(call);
  check(launch(call, group.stream(0)) == cudaErrorInvalidValue,
        std::string("not refused: ") + what);
  check(group.capture()[0].empty(), std::string("launched: ") + what);
}

void check_refusals() {
  alignas(16) std::array<std::byte, 256> memory{};
  using Encode = cuda::EncodeManyCall;
  using Decode = cuda::DecodeManyCall;
  Encode encode;
  encode.vectors = 1;
  encode.vector[0] = {memory.data(), 8, memory.data() + 64};
  Decode decode;
  decode.vectors = 1;
  decode.vector[0] = {memory.data(), 8};
  decode.code[0] = memory.data() + 64;
  const auto refuse = [&](void (*spoil)(Encode&), const char* what) {
    check_refused(&cuda::encode_many, encode, spoil, what);
  };
  refuse([](Encode& call) { call.codec.block = 48; }, "a block of 48");
  refuse([](Encode& call) { call.codec.block = 8192; }, "a block of 8192");
  refuse([](Encode& call) { call.codec = {CodecKind::sign, 256, true}; }, "stochastic signs");
  refuse([](Encode& call) { call.codec.kind = CodecKind::kCount; }, "no codec");
  refuse([](Encode& call) { call.dtype = DType::float64; }, "float64");
  refuse([](Encode& call) { call.vectors = cuda::kMaxVectors + 1; }, "too many vectors");
  refuse([](Encode& call) { call.vector[0].code += 8; }, "a code that is not aligned");
  const auto refuse_sum = [&](void (*spoil)(Decode&), const char* what) {
    check_refused(&cuda::decode_many, decode, spoil, what);
  };
  refuse_sum([](Decode& call) { call.codes = 0; }, "no codes");
  refuse_sum([](Decode& call) { call.codes = cuda::kMaxCodes + 1; }, "too many codes");
  refuse_sum([](Decode& call) { call.code[0] += 4; }, "a code that is not aligned");
  refuse_sum([](Decode& call) { call.vectors = -1; }, "fewer than no vectors");
}

}  // namespace

uint64_t encode_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 131 + 29);
  check_refusals();
  for (uint64_t i = 0; i < cases; ++i) check_encode(settings, i + settings.seed, rng);
  return cases;
}

uint64_t decode_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 137 + 31);
  for (uint64_t i = 0; i < cases; ++i) check_decode(settings, i + settings.seed, rng);
  return cases;
}

}  // namespace pycoll::sim::tests
