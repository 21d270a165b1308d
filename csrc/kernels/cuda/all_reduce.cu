#include <algorithm>

#include "device/launch.cuh"
#include "kernels/cuda/all_reduce.cuh"

namespace pycoll::cuda {
namespace {

constexpr uint64_t kPacketBytes = 1 << 10;  // of a block, before there is another one

// A kernel by element type, and what one of its blocks takes before there is another one.
struct Kernels {
  using Kernel = void (*)(AllReduceArguments);
  Kernel float32;
  Kernel float16;
  Kernel bfloat16;
  uint64_t block_bytes;

  // nullptr: there is none.
  Kernel of(DType dtype) const {
    if (dtype == DType::float32) return float32;
    if (dtype == DType::float16) return float16;
    return dtype == DType::bfloat16 ? bfloat16 : nullptr;
  }
};
constexpr Kernels kOneShotLl{&one_shot_ll_kernel<float>, &one_shot_ll_kernel<__half>,
                             &one_shot_ll_kernel<__nv_bfloat16>, kPacketBytes};
constexpr Kernels kOneShot{&one_shot_kernel<float>, &one_shot_kernel<__half>,
                           &one_shot_kernel<__nv_bfloat16>, 16 << 10};
constexpr Kernels kTwoShot{&two_shot_kernel<float>, &two_shot_kernel<__half>,
                           &two_shot_kernel<__nv_bfloat16>, 64 << 10};

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

cudaError_t launch(const Kernels& kernels, const GroupView& group, const AllReduceCall& call,
                   cudaStream_t stream, const Shape& shape, int32_t threads) {
  const bool has = has_fast_all_reduce(call.arithmetic.dtype, call.arithmetic.op);
  const Kernels::Kernel kernel = has ? kernels.of(call.arithmetic.dtype) : nullptr;
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return device::launch(
      kernel, {dim3(static_cast<unsigned>(shape.blocks)), dim3(static_cast<unsigned>(threads))},
      stream, arguments_of(group, call, shape));
}

cudaError_t launch_in_windows(const Kernels& kernels, const GroupView& group,
                              const AllReduceCall& call, cudaStream_t stream) {
  const Geometry& g = group.geometry;
  const uint64_t element = size_of(call.arithmetic.dtype);
  return launch(kernels, group, call, stream,
                shape_of(call.count, element, kernels.block_bytes, g.blocks), g.threads);
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
  return launch(kOneShotLl, group, call, stream, shape, std::min(threads, g.threads));
}

cudaError_t all_reduce_one_shot(const GroupView& group, const AllReduceCall& call,
                                cudaStream_t stream) {
  return launch_in_windows(kOneShot, group, call, stream);
}

cudaError_t all_reduce_two_shot(const GroupView& group, const AllReduceCall& call,
                                cudaStream_t stream) {
  return launch_in_windows(kTwoShot, group, call, stream);
}

}  // namespace pycoll::cuda
