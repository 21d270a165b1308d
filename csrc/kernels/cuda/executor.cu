#include "device/launch.cuh"
#include "kernels/cuda/executor.cuh"
#include "kernels/cuda/plan.h"

namespace pycoll::cuda {
namespace {

template <class Arithmetic>
cudaError_t launch_executor(const GroupView& group, const ProgramCall& call,
                            const typename Arithmetic::Parameters& parameters,
                            cudaStream_t stream) {
  using Arguments = ExecutorArguments<typename Arithmetic::Parameters>;
  static_assert(sizeof(Arguments) <= 4096, "what every GPU takes by value");
  const ProgramCut cut = cut_program(group.geometry, call);
  const ProgramHeader& header = call.image->header;
  if (cut.plan.slice == 0) return cudaErrorInvalidValue;
  if (header.lanes == 0) return cudaSuccess;
  const Arguments arguments{group,      call.call,          header,
                            cut.plan,   cut.input,          cut.output,
                            call.steps, cut.scratch_stride, parameters};
  const auto blocks = static_cast<unsigned>(header.lanes * cut.plan.channels);
  const device::LaunchShape shape{dim3(blocks), dim3(static_cast<unsigned>(cut.plan.threads))};
  return device::launch(&run_program_kernel<Arithmetic>, shape, stream, arguments);
}

template <class T>
cudaError_t launch_sum(const GroupView& group, const ProgramCall& call, cudaStream_t stream) {
  const bool averages = call.arithmetic.op == ReduceOp::avg;
  const float divisor = averages ? static_cast<float>(call.arithmetic.world_size) : 0.0f;
  return launch_executor<FloatSum<T>>(group, call, {divisor}, stream);
}

}  // namespace

cudaError_t run_program(const GroupView& group, const ProgramCall& call, cudaStream_t stream) {
  switch (route_of(call.arithmetic)) {
    case Route::move:
      return launch_executor<Move>(group, call, {0}, stream);
    case Route::float32:
      return launch_sum<float>(group, call, stream);
    case Route::float16:
      return launch_sum<__half>(group, call, stream);
    case Route::bfloat16:
      return launch_sum<__nv_bfloat16>(group, call, stream);
    case Route::any_op: {
      AnyOp op;
      find_any_op(call.arithmetic.dtype, call.arithmetic.op, call.arithmetic.world_size, &op);
      return launch_executor<AnyOpArithmetic>(group, call, op, stream);
    }
    case Route::unsupported:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace pycoll::cuda
