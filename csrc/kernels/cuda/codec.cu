#include <algorithm>
#include <bit>

#include "device/launch.cuh"
#include "kernels/cuda/codec.cuh"

namespace pycoll::cuda {
namespace {

using element::MinMax;
using element::ScaledFloat8;
using element::SymmetricInteger;

// A tile of blocks up to 2048 values; the longest ones need twice the threads.
constexpr uint64_t kThreads = 256;
static_assert(kMostBlock <= kMaxThreads * kUnit);
// Enough for any GPU; each has many tiles where there are more.
constexpr uint64_t kMostBlocks = 2048;

using EncodeKernel = void (*)(EncodeArguments);
struct Row {
  EncodeKernel nearest;  // of blocks; nullptr: there is none
  EncodeKernel random;
  void (*decode)(DecodeArguments);
};
template <class C>
constexpr Row nearest_only = {&encode_blocks_kernel<C, false>, nullptr,
                              &decode_kernel<BlockDecoder<C>>};
template <class C>
constexpr Row both = {&encode_blocks_kernel<C, false>, &encode_blocks_kernel<C, true>,
                      &decode_kernel<BlockDecoder<C>>};
template <class C>
constexpr Row random_only = {nullptr, &encode_blocks_kernel<C, true>,
                             &decode_kernel<BlockDecoder<C>>};

// By CodecKind.
constexpr Row kRows[] = {
    {nullptr, nullptr, &decode_kernel<NarrowDecoder<element::Float16>>},
    {nullptr, nullptr, &decode_kernel<NarrowDecoder<element::BFloat16>>},
    nearest_only<ScaledFloat8<element::Float8E4M3>>,
    nearest_only<ScaledFloat8<element::Float8E5M2>>,
    both<SymmetricInteger<8>>,
    both<SymmetricInteger<4>>,
    both<MinMax<8>>,
    both<MinMax<4>>,
    nearest_only<element::Sign>,
    random_only<element::Ternary>,
};
static_assert(sizeof(kRows) / sizeof(kRows[0]) == static_cast<size_t>(CodecKind::kCount));

bool is_aligned(const void* p, uint64_t to) {
  return reinterpret_cast<uintptr_t>(p) % to == 0;
}

bool can_be(const Codec& codec) {
  return codec.kind >= CodecKind{} && codec.kind < CodecKind::kCount &&
         std::has_single_bit(codec.block) && codec.block >= kLeastBlock &&
         codec.block <= kMostBlock &&
         (!codec.stochastic || traits_of(codec.kind).may_be_stochastic);
}

bool is_valid(const EncodeManyCall& call) {
  if (!can_be(call.codec) || !can_encode(call.dtype)) return false;
  if (call.vectors < 0 || call.vectors > kMaxVectors || call.blocks < 0) return false;
  return std::all_of(call.vector, call.vector + call.vectors, [&](const auto& vector) {
    return is_aligned(vector.values, size_of(call.dtype)) &&
           is_aligned(vector.code, kCodeAlignment) && is_aligned(vector.residual, sizeof(float));
  });
}

bool is_valid(const DecodeManyCall& call) {
  if (!can_be(call.codec) || !can_encode(call.dtype)) return false;
  if (call.vectors < 0 || call.vectors > kMaxVectors || call.blocks < 0) return false;
  if (call.codes < 1 || call.codes > kMaxCodes || call.vectors * call.codes > kMaxCodes) {
    return false;
  }
  return std::all_of(call.code, call.code + call.vectors * call.codes,
                     [](const std::byte* code) { return is_aligned(code, kCodeAlignment); }) &&
         std::all_of(call.vector, call.vector + call.vectors, [&](const auto& vector) {
           return is_aligned(vector.values, size_of(call.dtype));
         });
}

// Tiles of whole codec blocks, or one for each vector: only then may the threads be fewer.
template <class Call>
device::LaunchShape cut(const Call& call, Tiles& tiles) {
  uint64_t longest = 0;
  for (int32_t v = 0; v < call.vectors; ++v) longest = std::max(longest, call.vector[v].count);
  const uint64_t most = std::max<uint64_t>(kThreads, call.codec.block / kUnit);
  const uint64_t units = std::min((longest + kUnit - 1) / kUnit, most);
  const uint64_t threads = std::max<uint64_t>((units + kWarp - 1) / kWarp * kWarp, kWarp);
  const uint64_t tile = threads * kUnit;
  tiles.block_bits = static_cast<uint32_t>(std::countr_zero(call.codec.block));
  uint64_t first = 0;
  for (int32_t v = 0; v < call.vectors; ++v) {
    const uint64_t count = call.vector[v].count;
    tiles.codes_at[v] = codes_at(call.codec, count);
    tiles.first_tile[v] = first;
    first += count / tile + (count % tile != 0 ? 1 : 0);
  }
  tiles.first_tile[call.vectors] = first;
  const uint64_t limit = call.blocks == 0 ? kMostBlocks : static_cast<uint64_t>(call.blocks);
  const uint64_t blocks = std::min(first, limit);
  return {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads))};
}

cudaError_t encode_half(const EncodeArguments& arguments, const device::LaunchShape& shape,
                        cudaStream_t stream) {
  const device::LaunchShape one{dim3(1), dim3(kMaxVectors)};
  cudaError_t error = device::launch(&clear_exponents_kernel, one, stream, arguments);
  for (const Pass pass : {Pass::first, Pass::second}) {
    if (error != cudaSuccess) return error;
    error = device::launch(&encode_narrow_kernel<element::Float16>, shape, stream, arguments, pass);
  }
  return error;
}

}  // namespace

cudaError_t encode_many(const EncodeManyCall& call, cudaStream_t stream) {
  if (!is_valid(call)) return cudaErrorInvalidValue;
  EncodeArguments arguments{call, {}};
  device::LaunchShape shape = cut(call, arguments.tiles);
  if (shape.grid.x == 0) return cudaSuccess;
  if (call.codec.kind == CodecKind::fp16) return encode_half(arguments, shape, stream);
  if (call.codec.kind == CodecKind::bf16) {
    return device::launch(&encode_narrow_kernel<element::BFloat16>, shape, stream, arguments,
                          Pass::only);
  }
  const bool random = call.codec.stochastic || traits_of(call.codec.kind).always_stochastic;
  const Row& row = kRows[static_cast<int>(call.codec.kind)];
  shape.shared_bytes = size_t{shape.block.x} * kUnit * sizeof(float);
  return device::launch(random ? row.random : row.nearest, shape, stream, arguments);
}

cudaError_t decode_many(const DecodeManyCall& call, cudaStream_t stream) {
  if (!is_valid(call)) return cudaErrorInvalidValue;
  DecodeArguments arguments{call, {}};
  const device::LaunchShape shape = cut(call, arguments.tiles);
  if (shape.grid.x == 0) return cudaSuccess;
  return device::launch(kRows[static_cast<int>(call.codec.kind)].decode, shape, stream, arguments);
}

}  // namespace pycoll::cuda
