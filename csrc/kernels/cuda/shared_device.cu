#include <algorithm>
#include <bit>
#include <optional>

#include "device/launch.cuh"
#include "kernels/cuda/shared_device.cuh"

namespace pycoll::cuda {
namespace {

// Enough for any GPU; they take turns where they do not fit.
constexpr uint64_t kMostBlocks = 1024;
constexpr uint64_t kThreads = 512;
constexpr uint64_t kBytesPerThread = 64;

// For work on so many bytes of one vector.
device::LaunchShape grid_for(uint64_t bytes) {
  const uint64_t threads = (bytes + kBytesPerThread - 1) / kBytesPerThread;
  const uint64_t block = std::clamp<uint64_t>((threads + 31) / 32 * 32, 32, kThreads);
  const uint64_t blocks = std::clamp<uint64_t>((threads + block - 1) / block, 1, kMostBlocks);
  return {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(block))};
}

template <class Arithmetic>
cudaError_t launch_reduce(const ReduceManyCall& call,
                          const typename Arithmetic::Parameters& parameters, cudaStream_t stream) {
  const Elements e = elements_of(call.arithmetic);
  const ReduceManyArguments<typename Arithmetic::Parameters> arguments{call, parameters};
  return device::launch(&reduce_many_kernel<Arithmetic>, grid_for((call.end - call.begin) * e.size),
                        stream, arguments);
}

template <class Arithmetic>
cudaError_t launch_reduce(const ReducePlacesCall& call,
                          const typename Arithmetic::Parameters& parameters, cudaStream_t stream) {
  const Elements e = elements_of(call.arithmetic);
  const ReducePlacesArguments<typename Arithmetic::Parameters> arguments{call, parameters};
  return device::launch(&reduce_places_kernel<Arithmetic>,
                        grid_for((call.end - call.begin) * e.size), stream, arguments);
}

template <class T, class Call>
cudaError_t launch_sum(const Call& call, cudaStream_t stream) {
  const bool averages = call.arithmetic.op == ReduceOp::avg;
  const float divisor = averages ? static_cast<float>(call.arithmetic.world_size) : 0.0f;
  return launch_reduce<FloatSum<T>>(call, {divisor}, stream);
}

template <class Call>
cudaError_t reduce(const Call& call, cudaStream_t stream) {
  const bool in_range = call.sources >= 1 && call.sources <= kMaxRanks && call.targets >= 1 &&
                        call.targets <= kMaxRanks && call.begin <= call.end;
  if (!in_range) return cudaErrorInvalidValue;
  Call parts = call;
  const Elements e = elements_of(call.arithmetic);
  parts.begin *= e.parts;
  parts.end *= e.parts;
  if (parts.begin == parts.end) return cudaSuccess;
  switch (route_of(call.arithmetic)) {
    case Route::float32:
      return launch_sum<float>(parts, stream);
    case Route::float16:
      return launch_sum<__half>(parts, stream);
    case Route::bfloat16:
      return launch_sum<__nv_bfloat16>(parts, stream);
    case Route::any_op: {
      AnyOp op;
      find_any_op(call.arithmetic.dtype, call.arithmetic.op, call.arithmetic.world_size, &op);
      return launch_reduce<AnyOpArithmetic>(parts, op, stream);
    }
    case Route::move:
    case Route::unsupported:
      break;
  }
  return cudaErrorInvalidValue;
}

// The longest of them; nullopt: the call is out of range.
template <class Call>
std::optional<uint64_t> most_bytes(const Call& call) {
  if (call.copies < 0 || call.copies > kMaxRanks) return std::nullopt;
  uint64_t most = 0;
  for (int32_t i = 0; i < call.copies; ++i) most = std::max(most, call.bytes[i]);
  return most;
}

using CastKernel = void (*)(CastCall);
struct CastRow {
  DType from;
  DType to;
  CastKernel kernel;
};
template <class From>
constexpr CastRow cast_to(DType from, DType to) {
  if (to == DType::float32) return {from, to, &cast_kernel<From, float>};
  if (to == DType::float16) return {from, to, &cast_kernel<From, __half>};
  return {from, to, &cast_kernel<From, __nv_bfloat16>};
}
constexpr DType kFloats[] = {DType::float32, DType::float16, DType::bfloat16};

bool find_cast(DType from, DType to, CastRow* row) {
  if (std::find(std::begin(kFloats), std::end(kFloats), to) == std::end(kFloats)) return false;
  switch (from) {
    case DType::float32:
      *row = cast_to<float>(from, to);
      return true;
    case DType::float16:
      *row = cast_to<__half>(from, to);
      return true;
    case DType::bfloat16:
      *row = cast_to<__nv_bfloat16>(from, to);
      return true;
    default:
      return false;
  }
}

}  // namespace

cudaError_t reduce_many(const ReduceManyCall& call, cudaStream_t stream) {
  return reduce(call, stream);
}

cudaError_t reduce_places(const ReducePlacesCall& call, cudaStream_t stream) {
  return reduce(call, stream);
}

cudaError_t copy_many(const CopyManyCall& call, cudaStream_t stream) {
  const std::optional<uint64_t> most = most_bytes(call);
  if (!most) return cudaErrorInvalidValue;
  if (*most == 0) return cudaSuccess;
  return device::launch(&copy_many_kernel, grid_for(*most), stream, call);
}

cudaError_t copy_places(const CopyPlacesCall& call, cudaStream_t stream) {
  const std::optional<uint64_t> most = most_bytes(call);
  if (!most) return cudaErrorInvalidValue;
  if (*most == 0 && call.agreement.differs == nullptr) return cudaSuccess;
  return device::launch(&copy_places_kernel, grid_for(*most), stream, call);
}

cudaError_t cast(const CastCall& call, cudaStream_t stream) {
  CastRow row{};
  if (!find_cast(call.from, call.to, &row)) return cudaErrorInvalidValue;
  if (call.count == 0) return cudaSuccess;
  const uint64_t widest = std::max(size_of(call.from), size_of(call.to));
  return device::launch(row.kernel, grid_for(call.count * widest), stream, call);
}

cudaError_t scale(const ScaleCall& call, cudaStream_t stream) {
  if (has_fast_all_reduce(call.dtype, ReduceOp::sum)) {
    return cast({.from = call.dtype,
                 .to = call.dtype,
                 .input = call.input,
                 .output = call.output,
                 .count = call.count,
                 .scale = static_cast<float>(call.factor)},
                stream);
  }
  AnyOp op;
  if (!find_any_op(call.dtype, ReduceOp::premul_sum, 1, &op)) return cudaErrorInvalidValue;
  if (call.count == 0) return cudaSuccess;
  const bool wide = op.combine == Combine::add_float64;
  op.combine = wide ? Combine::multiply_float64 : Combine::multiply_float32;
  const uint64_t factor = wide ? std::bit_cast<uint64_t>(call.factor)
                               : std::bit_cast<uint32_t>(static_cast<float>(call.factor));
  const ScaleArguments arguments{op, call.input, call.output, call.count * op.parts, factor};
  return device::launch(&scale_any_kernel, grid_for(arguments.count * op.value_bytes), stream,
                        arguments);
}

}  // namespace pycoll::cuda
