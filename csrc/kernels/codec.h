// Codecs: vectors of floats as fewer bytes, for the wire. Element maths in kernels/codec_element.h.
//
// The code of n values, at any alignment:
//
//   [exponent]  fp16 only: a power of two, int32, then zeros up to 16 bytes
//   [scales]    `scales` floats for each block of `block` values (the last may be shorter), then
//               zeros up to a multiple of 16 bytes
//   [codes]     `bits` bits a value, the first in the lowest bits, then zeros up to 16 bytes
//
// What holds for every codec:
//   * the same bytes from every instruction set, and from the CUDA form;
//   * a block whose largest magnitude is below 1e-30 decodes as zeros;
//   * a block with a NaN or an infinity decodes as NaN throughout; fp16 and bf16, which have no
//     blocks, carry such a value itself;
//   * a finite value never decodes as a non-finite one, but for bf16 next to the largest float32,
//     which rounds to infinity as IEEE 754 says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/dtype.h"
#include "kernels/reduce.h"

namespace pycoll {

enum class CodecKind : int {
  fp16,
  bf16,
  fp8_e4m3,
  fp8_e5m2,
  int8,
  int4,
  uint8,
  uint4,
  sign,
  ternary,
  kCount
};
std::string_view name_of(CodecKind kind);

struct CodecTraits {
  std::string_view name;
  int bits;                // a value
  int scales;              // floats a block; 0: no blocks
  bool may_be_stochastic;  // else values round to nearest, ties to even
  bool always_stochastic;
};
const CodecTraits& traits_of(CodecKind kind);

constexpr uint32_t kLeastBlock = 32;
constexpr uint32_t kMostBlock = 4096;

struct Codec {
  CodecKind kind = CodecKind::int8;
  uint32_t block = 256;  // values; a power of two of kLeastBlock to kMostBlock
  bool stochastic = false;

  bool operator==(const Codec&) const = default;
};

// Throws invalid_argument when the codec cannot be, saying why.
void check_codec(const Codec& codec);

// A number for what two ranks must agree on to read each other's codes, never 0; and what it says,
// for errors: "int8 in blocks of 256", "fp16".
uint8_t wire_tag(const Codec& codec);
std::string describe_wire_tag(uint8_t tag);

// Bytes of the code of n values: bits of the table and at most 47 more.
uint64_t code_bytes(const Codec& codec, uint64_t n);

// Where the codes begin in it, behind the exponent or the scales.
uint64_t codes_at(const Codec& codec, uint64_t n);

// Of stochastic rounding: value i has the random number of index first + i, so that a replay gives
// the same codes, however the vector is cut. Different ranks, steps and tensors (by `seed`) have
// independent numbers.
struct RandomKey {
  uint64_t seed = 0;
  uint32_t step = 0;
  uint32_t rank = 0;
  uint64_t first = 0;
};

// Types that codecs take and give: float32, float16, bfloat16.
bool can_encode(DType dtype);

struct EncodeRequest {
  Codec codec;
  RandomKey key;
  DType dtype;
  const void* values;
  size_t count;
  std::byte* code;  // code_bytes(codec, count)
  // Error feedback (Karimireddy et al., 2019), or nullptr. What is encoded is value + residual, in
  // float32, a NaN of either as it is in the value, else the quiet one; the residual becomes what
  // the code lacks of it. Blocks that are not finite leave it as it is; so do single values of fp16
  // and bf16.
  float* residual = nullptr;
};

// values[i] = (D(codes[0])[i] + D(codes[1])[i] + ...) / divisor, summed in float32 in that order,
// then rounded once. A NaN is always the quiet one without sign and payload.
struct DecodeRequest {
  Codec codec;
  const std::byte* const* codes;
  size_t code_count;  // 1 at least
  DType dtype;
  void* values;
  size_t count;
  float divisor = 1;
};

struct CodecKernels {
  void (*encode)(const EncodeRequest& request);
  void (*decode)(const DecodeRequest& request);
};

// `isa` must be available. Dtypes are checked by the caller.
const CodecKernels& codec_kernels(Isa isa);

}  // namespace pycoll
