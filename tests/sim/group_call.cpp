#include "group_call.h"

namespace pycoll::sim::tests {

void ok(cudaError_t error, const char* what) {
  check(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}

uint64_t draw_count(Rng& rng) {
  constexpr std::array<uint64_t, 5> kLimits{8, 70, 1000, 9000, 70000};
  return rng.below(kLimits[rng.below(rng.one_in(4) ? 5 : 4)] + 1);
}

CallShape draw_call(Rng& rng, int ranks) {
  CallShape shape;
  shape.collective = static_cast<Collective>(rng.below(static_cast<uint64_t>(Collective::kCount)));
  if (shape.collective == Collective::barrier) shape.collective = Collective::all_reduce;
  const bool sums = traits_of(shape.collective).reduces;
  do {
    shape.dtype = static_cast<DType>(rng.below(static_cast<uint64_t>(DType::kCount)));
    shape.op =
        sums ? static_cast<ReduceOp>(1 + rng.below(static_cast<uint64_t>(ReduceOp::kCount) - 1))
             : ReduceOp::none;
  } while (sums && find_reduce_kernels(shape.dtype, shape.op, Isa::baseline) == nullptr);
  shape.count = draw_count(rng);
  shape.root = static_cast<int32_t>(rng.below(static_cast<uint64_t>(ranks)));
  shape.in_place = rng.one_in(2);
  shape.offset = rng.one_in(3) ? rng.below(16) : 0;
  shape.seed = rng.next() % 100000;
  return shape;
}

cudaStream_t new_stream() {
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

void wait_for_device(GroupRank& rank, cudaStream_t stream) {
  while (cudaStreamQuery(stream) == cudaErrorNotReady) rank.group->check();
  ok(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  rank.group->check();
}

}  // namespace pycoll::sim::tests
