#include "device_batch.h"

#include <array>

namespace pycoll::sim::tests {

cuda::Geometry draw_geometry(Rng& rng, int32_t world_size) {
  cuda::Geometry geometry = small_geometry(world_size);
  geometry.depth = rng.one_in(3) ? 4 : 2;
  geometry.threads = rng.one_in(3) ? 64 : 32;
  if (kFewThreads) {
    geometry.threads = 8;
    geometry.blocks = 4;
  }
  return geometry;
}

uint32_t draw_counters(Rng& rng) {
  return rng.one_in(2) ? 0u - static_cast<uint32_t>(rng.below(5)) * 4 : 0u;
}

ReduceOp draw_op(Rng& rng, DType dtype) {
  constexpr std::array kOps{ReduceOp::sum, ReduceOp::avg,  ReduceOp::product,
                            ReduceOp::min, ReduceOp::max,  ReduceOp::band,
                            ReduceOp::bor, ReduceOp::bxor, ReduceOp::premul_sum};
  for (;;) {
    const ReduceOp op = kOps[rng.below(kOps.size())];
    if (find_reduce_kernels(dtype, op, Isa::baseline) != nullptr) return op;
  }
}

CallShape draw_shape(Rng& rng, uint64_t index, bool aligned) {
  CallShape shape;
  shape.count = size_of_case(index);
  shape.in_place = rng.one_in(2);
  shape.offset = aligned ? 0 : 1 + rng.below(8);
  shape.seed = rng.next() >> 8;
  return shape;
}

uint64_t size_index(uint64_t index, uint64_t kinds) {
  return index / kinds + index % kinds * 17;
}

bool Way::takes(DType dtype) const {
  if (by_hand != nullptr) return cuda::has_fast_all_reduce(dtype, ReduceOp::sum);
  if (!traits_of(collective).reduces) return true;
  return find_reduce_kernels(dtype, ReduceOp::sum, Isa::baseline) != nullptr;
}

const std::vector<Way>& kernels_by_hand() {
  static const std::vector<Way> all{
      {"one_shot_ll kernel", Collective::all_reduce, &cuda::all_reduce_one_shot_ll},
      {"one_shot kernel", Collective::all_reduce, &cuda::all_reduce_one_shot},
      {"two_shot kernel", Collective::all_reduce, &cuda::all_reduce_two_shot},
  };
  return all;
}

const std::vector<Way>& programs() {
  static const std::vector<Way> all = [] {
    std::vector<Way> some;
    for (const Algorithm& row : algorithms()) {
      if (!row.needs_lease) some.push_back({std::string(row.name), row.collective, nullptr});
    }
    return some;
  }();
  return all;
}

void Batch::add(const CallShape& shape, const Way& way) {
  const auto sequence = static_cast<uint32_t>(calls_.size());
  calls_.push_back(std::make_unique<CallData>(shape, world_size()));
  CallData& data = *calls_.back();
  names_.push_back(way.name + ", " + std::to_string(world_size()) + " ranks");
  if (way.by_hand != nullptr) {
    launch_by_hand(data, way, sequence);
  } else {
    launch_program(group_, data, way.name, keep_, sequence);
  }
  data.launch_use(group_);
}

void Batch::launch_by_hand(const CallData& data, const Way& way, uint32_t sequence) {
  const CallShape& shape = data.shape();
  const bool fits =
      shape.count * size_of(shape.dtype) <= cuda::one_shot_ll_limit(group_.geometry());
  const bool too_long = way.by_hand == &cuda::all_reduce_one_shot_ll && !fits;
  const auto launch = too_long ? &cuda::all_reduce_one_shot : way.by_hand;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    cuda::AllReduceCall call;
    call.call = {sequence * 3 + 1, sequence, static_cast<uint32_t>(shape.collective)};
    call.arithmetic = {shape.dtype, shape.op, world_size()};
    call.input = data.input(rank).block[0];
    call.output = data.output(rank).block[0];
    call.count = shape.count;
    check(launch(group_.view(rank), call, group_.stream(rank)) == cudaSuccess,
          "launch of " + way.name);
  }
}

void Batch::run() {
  group_.run();
  check_all();
}

void Batch::replay(int times) {
  const DeviceGroup::Graph graph = group_.capture();
  for (int i = 0; i < times; ++i) {
    group_.launch(graph);
    run();
    for (const auto& call : calls_) call->renew();
  }
}

void Batch::check_all() {
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    const cuda::ErrorRecord& error = group_.host(rank).error;
    check(error.trouble == 0,
          "rank " + std::to_string(rank) + " gave up: trouble " + std::to_string(error.trouble) +
              " in call " + std::to_string(error.sequence) + " (" + names_[error.sequence] + ", " +
              calls_[error.sequence]->shape().describe() + "), block " +
              std::to_string(error.block) + ", step " + std::to_string(error.step) + ", peer " +
              std::to_string(error.peer) + ", expected " + std::to_string(error.expected) +
              ", seen " + std::to_string(error.seen));
  }
  for (size_t i = 0; i < calls_.size(); ++i) calls_[i]->check(names_[i]);
}

}  // namespace pycoll::sim::tests
