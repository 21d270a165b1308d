#include "kernels/codec.h"

#include <bit>

#include "core/error.h"

namespace pycoll {
namespace {

// By CodecKind.
constexpr CodecTraits kTraits[] = {
    {"fp16", 16, 0, false, false},    {"bf16", 16, 0, false, false},
    {"fp8_e4m3", 8, 1, false, false}, {"fp8_e5m2", 8, 1, false, false},
    {"int8", 8, 1, true, false},      {"int4", 4, 1, true, false},
    {"uint8", 8, 2, true, false},     {"uint4", 4, 2, true, false},
    {"sign", 1, 1, false, false},     {"ternary", 2, 1, true, true},
};
static_assert(sizeof(kTraits) / sizeof(kTraits[0]) == static_cast<size_t>(CodecKind::kCount));

constexpr uint64_t kAlign = 16;
uint64_t round_up(uint64_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

const CodecTraits& traits_of(CodecKind kind) {
  return kTraits[static_cast<int>(kind)];
}

std::string_view name_of(CodecKind kind) {
  return traits_of(kind).name;
}

void check_codec(const Codec& codec) {
  const CodecTraits& traits = traits_of(codec.kind);
  const bool power_of_two = (codec.block & (codec.block - 1)) == 0;
  if (!power_of_two || codec.block < kLeastBlock || codec.block > kMostBlock) {
    fail(ErrorKind::invalid_argument, "codec ", traits.name, ": block=", codec.block,
         " is not a power of two from ", kLeastBlock, " to ", kMostBlock);
  }
  if (codec.stochastic && !traits.may_be_stochastic) {
    fail(ErrorKind::invalid_argument, "codec ", traits.name,
         " rounds to nearest only; int8, int4, uint8 and uint4 may be stochastic");
  }
}

constexpr int kBlockSizes = std::countr_zero(kMostBlock) - std::countr_zero(kLeastBlock) + 1;

uint8_t wire_tag(const Codec& codec) {
  const int block = std::countr_zero(codec.block) - std::countr_zero(kLeastBlock);
  return static_cast<uint8_t>(1 + static_cast<int>(codec.kind) * kBlockSizes + block);
}

std::string describe_wire_tag(uint8_t tag) {
  const int row = (tag - 1) / kBlockSizes;
  if (tag == 0 || row >= static_cast<int>(CodecKind::kCount)) return "an unknown codec";
  const CodecTraits& traits = kTraits[row];
  if (traits.scales == 0) return std::string(traits.name);
  return concat(traits.name, " in blocks of ", kLeastBlock << (tag - 1) % kBlockSizes);
}

uint64_t codes_at(const Codec& codec, uint64_t n) {
  const CodecTraits& traits = traits_of(codec.kind);
  const uint64_t blocks = (n + codec.block - 1) / codec.block;
  const uint64_t exponent = codec.kind == CodecKind::fp16 ? kAlign : 0;
  return exponent + round_up(blocks * static_cast<uint64_t>(traits.scales) * sizeof(float));
}

uint64_t code_bytes(const Codec& codec, uint64_t n) {
  if (n == 0) return 0;
  const auto bits = static_cast<uint64_t>(traits_of(codec.kind).bits);
  return codes_at(codec, n) + round_up((n * bits + 7) / 8);
}

bool can_encode(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

}  // namespace pycoll
