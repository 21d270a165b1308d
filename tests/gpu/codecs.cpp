#include "codecs.h"

#include <cmath>
#include <cstring>

#include "kernels/float_formats.h"
#include "native/random.h"

namespace pycoll::gpu_tests {
namespace {

using Bytes = std::vector<std::byte>;
using stress::mix;

constexpr RandomKey kKey{0x123456789abcdef0u, 3, 1, 0};

// Gaussian enough, over several powers of two; a block of zeros, one of which each value is next to
// nothing, and one with a NaN and an infinity.
Bytes values_of(DType dtype, uint64_t count, uint64_t seed) {
  Bytes bytes(count * size_of(dtype));
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t random = mix(seed * 0x10001 + i);
    float x =
        static_cast<float>(static_cast<int64_t>(random >> 32) - (int64_t{1} << 31)) * 0x1p-31f;
    x = std::ldexp(x, static_cast<int>(random % 16));
    const uint64_t block = i / 256 % 16;
    if (block == 3) x = 0;
    if (block == 5) x *= 1e-34f;
    if (block == 7 && i % 256 == 9) x = random % 2 != 0 ? std::nanf("") : INFINITY;
    if (block == 9) x *= 1e30f;
    const uint16_t half = dtype == DType::float16 ? element::round_to<element::Float16>(x).bits
                                                  : element::round_to<element::BFloat16>(x).bits;
    const void* from = dtype == DType::float32 ? static_cast<const void*>(&x) : &half;
    std::memcpy(bytes.data() + i * size_of(dtype), from, size_of(dtype));
  }
  return bytes;
}

// Memory on the GPU with these contents.
class Copy {
 public:
  explicit Copy(const Bytes& contents) : bytes_(contents.size()), memory_(contents.size() + 16) {
    require(cudaMemcpy(data(), contents.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::byte* data() const { return memory_.as<std::byte>(); }
  Bytes read() const {
    Bytes bytes(bytes_);
    require(cudaMemcpy(bytes.data(), data(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return bytes;
  }

 private:
  size_t bytes_;
  Memory memory_;
};

void compare(const Bytes& got, const Bytes& expected, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) continue;
    throw std::runtime_error(concat(what, ": byte ", i, " of ", expected.size(), " is ",
                                    std::to_integer<int>(got[i]), ", not ",
                                    std::to_integer<int>(expected[i])));
  }
}

void check_codec_of(const Codec& codec, DType dtype, uint64_t count, bool keeps) {
  const std::string what =
      concat(name_of(codec.kind), codec.stochastic ? " stochastic" : "", ", block ", codec.block,
             ", ", count, " ", name_of(dtype), keeps ? " with a residual" : "");
  const Bytes values = values_of(dtype, count, 1);
  const Bytes before = values_of(DType::float32, count, 2);
  Bytes code(code_bytes(codec, count), std::byte{0x5a}), residual = before;
  EncodeRequest request{codec, kKey, dtype, values.data(), count, code.data()};
  if (keeps) request.residual = reinterpret_cast<float*>(residual.data());
  const CodecKernels& host = codec_kernels(Isa::baseline);
  host.encode(request);

  const Copy on_gpu(values), kept(before), coded(Bytes(code.size(), std::byte{0xa5}));
  cuda::EncodeManyCall encode{codec, kKey, dtype};
  encode.vectors = 1;
  encode.vector[0] = {on_gpu.data(), count, coded.data(),
                      keeps ? reinterpret_cast<float*>(kept.data()) : nullptr};
  require(cuda::encode_many(encode, nullptr), what);
  compare(coded.read(), code, what + ": code");
  compare(kept.read(), residual, what + ": residual");

  const std::byte* const codes[] = {code.data(), code.data(), code.data()};
  Bytes sum(values.size());
  host.decode({codec, codes, 3, dtype, sum.data(), count, 3});
  const Copy decoded(Bytes(sum.size(), std::byte{0x7f}));
  cuda::DecodeManyCall decode{codec, dtype, 3};
  decode.vectors = 1;
  decode.vector[0] = {decoded.data(), count};
  decode.codes = 3;
  for (int i = 0; i < 3; ++i) decode.code[i] = coded.data();
  require(cuda::decode_many(decode, nullptr), what);
  compare(decoded.read(), sum, what + ": mean of three");
}

}  // namespace

void launch_encode(World& world, const Coded& coded) {
  cuda::EncodeManyCall call{{coded.kind, 256, coded.stochastic}, kKey, world.dtype()};
  call.vectors = 1;
  call.vector[0] = {world.input(0), world.count(), world.code()};
  require(cuda::encode_many(call, world.stream(0)), "encode");
}

void launch_decode(World& world, const Coded& coded) {
  cuda::DecodeManyCall call{{coded.kind, 256}, world.dtype()};
  call.vectors = 1;
  call.vector[0] = {world.output(0), world.count()};
  call.codes = coded.codes;
  for (int32_t i = 0; i < coded.codes; ++i) call.code[i] = world.code();
  require(cuda::decode_many(call, world.stream(0)), "decode");
}

// The host takes a while for long ones: only blocks of 256 have them.
int check_codecs(uint64_t longest) {
  int done = 0;
  for (int kind = 0; kind < static_cast<int>(CodecKind::kCount); ++kind) {
    for (const uint32_t block : {32u, 256u, 1024u, 4096u}) {
      for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
        const uint64_t most = block == 256 ? longest : 20011;
        for (const uint64_t count : {uint64_t{1}, uint64_t{255}, uint64_t{8193}, most}) {
          Codec codec{static_cast<CodecKind>(kind), block};
          codec.stochastic = done % 2 == 0 && traits_of(codec.kind).may_be_stochastic;
          check_codec_of(codec, dtype, count, done % 3 == 0);
          ++done;
        }
      }
    }
  }
  return done;
}

}  // namespace pycoll::gpu_tests
