// What launches calls on a group whose ranks are all here.
#include "device_call.h"
#include "kernels/cuda/program_image.h"
#include "scenario.h"

namespace pycoll::sim::tests {

void CallData::launch_use(DeviceGroup& group) {
  overwrites_ = shape_.seed % 2 == 0;
  for (int32_t rank = 0; rank < world_size_; ++rank) {
    Side& input = inputs_[static_cast<size_t>(rank)];
    Side& output = outputs_[static_cast<size_t>(rank)];
    cuda::CopyManyCall reads, writes;
    if (output.vector != nullptr) {
      output.seen = std::make_shared<Buffer>(output.bytes, 16);
      reads = {1, {output.vector->data() + output.at}, {output.seen->data()}, {output.bytes}};
    }
    if (overwrites_ && input.vector != nullptr && input.vector != output.vector) {
      rubbish_.push_back(std::make_shared<Buffer>(input.bytes));
      writes = {1, {rubbish_.back()->data()}, {input.vector->data()}, {input.bytes}};
    }
    for (const cuda::CopyManyCall& call : {reads, writes}) {
      tests::check(cuda::copy_many(call, group.stream(rank)) == cudaSuccess, "launch of copy_many");
    }
  }
}

void launch_program(DeviceGroup& group, const CallData& data, const std::string& algorithm,
                    Keep& keep, uint32_t sequence) {
  const CallShape& shape = data.shape();
  for (int32_t rank = 0; rank < group.world_size(); ++rank) {
    const Program program = build_program(
        algorithm, {shape.collective, rank, group.world_size(), shape.root, shape.hosts});
    const auto image = std::make_shared<cuda::ProgramImage>(cuda::compile(program));
    keep.push_back(image);
    cuda::ProgramCall call;
    call.call = {0x1234u + sequence * 7, sequence, static_cast<uint32_t>(shape.collective)};
    call.arithmetic = {shape.dtype, traits_of(shape.collective).reduces ? shape.op : ReduceOp::none,
                       group.world_size()};
    call.input = data.input(rank);
    call.output = data.output(rank);
    call.image = image.get();
    call.steps = image->steps.data();
    const cudaError_t error = cuda::run_program(group.view(rank), call, group.stream(rank));
    check(error == cudaSuccess,
          "run_program of " + algorithm + ", " + shape.describe() + ": " + std::to_string(error));
  }
}

}  // namespace pycoll::sim::tests
