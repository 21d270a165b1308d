#include <algorithm>

#include "device/launch.cuh"
#include "kernels/cuda/all_reduce.cuh"

namespace pycoll::cuda {
namespace {

// What a block takes before there is another one.
constexpr uint64_t kOneShotBytes = 16 << 10;
constexpr uint64_t kTwoShotBytes = 64 << 10;
constexpr uint64_t kDirectBytes = 32 << 10;
constexpr uint64_t kPacketBytes = 1 << 10;

struct Shape {
  uint64_t share;  // elements a block
  int32_t blocks;
};

uint64_t divide_up(uint64_t x, uint64_t by) {
  return (x + by - 1) / by;
}

// One block for `bytes`, at most `blocks`. Shares are lines, so that they keep the vector's
// alignment.
Shape shape_of(uint64_t count, uint64_t element, uint64_t bytes, int32_t blocks) {
  const uint64_t line = 64 / element;
  const uint64_t wanted = std::max<uint64_t>(1, divide_up(count * element, bytes));
  const uint64_t most = std::min(wanted, static_cast<uint64_t>(blocks));
  const uint64_t share = std::max<uint64_t>(1, divide_up(divide_up(count, most), line)) * line;
  const uint64_t used = std::max<uint64_t>(1, divide_up(count, share));
  return {share, static_cast<int32_t>(used)};
}

AllReduceArguments arguments_of(const GroupView& group, const AllReduceCall& call,
                                const Shape& shape) {
  const bool averages = call.arithmetic.op == ReduceOp::avg;
  return {group,
          call.call,
          call.input,
          call.output,
          call.count,
          shape.share,
          (1u << group.geometry.world_size) - 1,
          averages ? static_cast<float>(call.arithmetic.world_size) : 0.0f};
}

device::LaunchShape launch_shape(const Shape& shape, int32_t threads) {
  return {dim3(static_cast<unsigned>(shape.blocks)), dim3(static_cast<unsigned>(threads))};
}

// launch_as<T>() for the element type, of those that are fast.
template <class Launch>
cudaError_t by_type(const AllReduceCall& call, const Launch& launch) {
  if (!has_fast_all_reduce(call.arithmetic.dtype, call.arithmetic.op)) return cudaErrorInvalidValue;
  switch (call.arithmetic.dtype) {
    case DType::float32:
      return launch(float{});
    case DType::float16:
      return launch(__half{});
    case DType::bfloat16:
      return launch(__nv_bfloat16{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

uint64_t one_shot_ll_limit(const Geometry& geometry) {
  return std::min(kPacketBytes, uint64_t{geometry.packets} * 4 / 64 * 64) *
         static_cast<uint64_t>(geometry.blocks);
}

cudaError_t all_reduce_one_shot_ll(const GroupView& group, const AllReduceCall& call,
                                   cudaStream_t stream) {
  const Geometry& g = group.geometry;
  const uint64_t element = size_of(call.arithmetic.dtype);
  if (call.count * element > one_shot_ll_limit(g)) return cudaErrorInvalidValue;
  const uint64_t bytes = one_shot_ll_limit(g) / static_cast<uint64_t>(g.blocks);
  const Shape shape = shape_of(call.count, element, bytes, g.blocks);
  const uint64_t words = divide_up(std::min(shape.share, call.count) * element, 4);
  const auto threads = static_cast<int32_t>(std::max<uint64_t>(1, divide_up(words, 32)) * 32);
  return by_type(call, [&](auto type) {
    return device::launch(&one_shot_ll_kernel<decltype(type)>,
                          launch_shape(shape, std::min(threads, g.threads)), stream,
                          arguments_of(group, call, shape));
  });
}

cudaError_t all_reduce_one_shot(const GroupView& group, const AllReduceCall& call,
                                cudaStream_t stream) {
  const Shape shape =
      shape_of(call.count, size_of(call.arithmetic.dtype), kOneShotBytes, group.geometry.blocks);
  return by_type(call, [&](auto type) {
    return device::launch(&one_shot_kernel<decltype(type)>,
                          launch_shape(shape, group.geometry.threads), stream,
                          arguments_of(group, call, shape));
  });
}

cudaError_t all_reduce_two_shot(const GroupView& group, const AllReduceCall& call,
                                cudaStream_t stream) {
  const Shape shape =
      shape_of(call.count, size_of(call.arithmetic.dtype), kTwoShotBytes, group.geometry.blocks);
  return by_type(call, [&](auto type) {
    return device::launch(&two_shot_kernel<decltype(type)>,
                          launch_shape(shape, group.geometry.threads), stream,
                          arguments_of(group, call, shape));
  });
}

cudaError_t all_reduce_two_shot_direct(const GroupView& group, const AllReduceCall& call,
                                       const PeerVectors& vectors, cudaStream_t stream) {
  const uint64_t element = size_of(call.arithmetic.dtype);
  const auto world = static_cast<uint64_t>(group.geometry.world_size);
  const uint64_t line = 64 / element;
  const uint64_t part = divide_up(divide_up(call.count, world), line) * line;
  const Shape shape = shape_of(part, element, kDirectBytes, group.geometry.blocks);
  const DirectArguments arguments{arguments_of(group, call, shape), vectors};
  return by_type(call, [&](auto type) {
    return device::launch(&two_shot_direct_kernel<decltype(type)>,
                          launch_shape(shape, group.geometry.threads), stream, arguments);
  });
}

}  // namespace pycoll::cuda
