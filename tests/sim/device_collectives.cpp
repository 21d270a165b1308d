// Collectives of ranks on different devices: hand-made kernels and Programs, many calls of a group
// one after the other, so that what a call leaves in windows, slots and counters meets the next.
#include <algorithm>
#include <array>

#include "device_scenarios.h"

namespace pycoll::sim::tests {
namespace {

using stress::Rng;

// Waits of a group that is alive are short.
constexpr uint32_t kCallsPerGroup = 16;

// Under ThreadSanitizer few threads may be resident at a time.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PYCOLL_FEW_THREADS 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define PYCOLL_FEW_THREADS 1
#endif

// Up to 8 ranks most of the time, now and then as many as kernels can reach.
int32_t draw_world_size(Rng& rng) {
#if defined(PYCOLL_FEW_THREADS)
  return static_cast<int32_t>(1 + rng.below(5));
#else
  const bool many = rng.one_in(12);
  return static_cast<int32_t>(many ? 9 + rng.below(cuda::kMaxRanks - 8) : 1 + rng.below(8));
#endif
}

cuda::Geometry draw_geometry(Rng& rng, int32_t world_size) {
  cuda::Geometry geometry = small_geometry(world_size);
  geometry.depth = rng.one_in(3) ? 4 : 2;
#if defined(PYCOLL_FEW_THREADS)
  geometry.threads = 8;
  geometry.blocks = 4;
#else
  geometry.threads = rng.one_in(3) ? 64 : 32;
#endif
  return geometry;
}

// Just before they wrap, now and then.
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

DType draw_reducible(Rng& rng) {
  for (;;) {
    const auto dtype = static_cast<DType>(rng.below(static_cast<uint64_t>(DType::kCount)));
    if (find_reduce_kernels(dtype, ReduceOp::sum, Isa::baseline) != nullptr) return dtype;
  }
}

DType draw_fast(Rng& rng) {
  constexpr std::array kFast{DType::float32, DType::float16, DType::bfloat16};
  return kFast[rng.below(kFast.size())];
}

// A few calls of one group, launched together and then run: ranks may be calls apart.
class Batch {
 public:
  Batch(const Settings& settings, Rng& rng, int32_t world_size)
      : group_(draw_geometry(rng, world_size), settings.options(), draw_counters(rng)) {}

  DeviceGroup& group() { return group_; }
  Keep& keep() { return keep_; }
  CallData& add(const CallShape& shape, const std::string& how) {
    names_.push_back(how + ", " + std::to_string(group_.world_size()) + " ranks");
    calls_.push_back(std::make_unique<CallData>(shape, group_.world_size()));
    return *calls_.back();
  }
  void run() {
    group_.run();
    check_all();
  }
  // All calls so far as a captured graph, run again and again, on new data.
  void replay(int times) {
    const DeviceGroup::Graph graph = group_.capture();
    for (int i = 0; i < times; ++i) {
      group_.launch(graph);
      run();
      for (const auto& call : calls_) call->renew();
    }
  }
  void forget() { calls_.clear(), names_.clear(), keep_.clear(); }

 private:
  void check_all() {
    for (int32_t rank = 0; rank < group_.world_size(); ++rank) {
      const cuda::ErrorRecord& error = group_.host(rank).error;
      check(error.trouble == 0,
            "rank " + std::to_string(rank) + " gave up: trouble " + std::to_string(error.trouble) +
                " in call " + std::to_string(error.sequence) + " (" + names_[error.sequence] +
                ", " + calls_[error.sequence]->shape().describe() + "), block " +
                std::to_string(error.block) + ", step " + std::to_string(error.step) + ", peer " +
                std::to_string(error.peer) + ", expected " + std::to_string(error.expected) +
                ", seen " + std::to_string(error.seen));
    }
    for (size_t i = 0; i < calls_.size(); ++i) calls_[i]->check(names_[i]);
  }

  DeviceGroup group_;
  std::vector<std::unique_ptr<CallData>> calls_;
  std::vector<std::string> names_;
  Keep keep_;
};

enum class Kind : uint8_t { ll, one_shot, two_shot, direct, kCount };
constexpr std::array<const char*, 4> kKinds{"one_shot_ll", "one_shot", "two_shot",
                                            "two_shot_direct"};

void launch_all_reduce(DeviceGroup& group, const CallData& data, Kind kind, uint32_t sequence) {
  const CallShape& shape = data.shape();
  cuda::PeerVectors vectors;
  for (int32_t rank = 0; rank < group.world_size(); ++rank) {
    vectors.input[rank] = data.input(rank).block[0];
    vectors.output[rank] = data.output(rank).block[0];
  }
  for (int32_t rank = 0; rank < group.world_size(); ++rank) {
    cuda::AllReduceCall call;
    call.call = {sequence * 3 + 1, sequence, static_cast<uint32_t>(shape.collective)};
    call.arithmetic = {shape.dtype, shape.op, group.world_size()};
    call.input = vectors.input[rank];
    call.output = vectors.output[rank];
    call.count = shape.count;
    const cuda::GroupView& view = group.view(rank);
    const cudaStream_t stream = group.stream(rank);
    cudaError_t error = cudaErrorUnknown;
    if (kind == Kind::ll) error = cuda::all_reduce_one_shot_ll(view, call, stream);
    if (kind == Kind::one_shot) error = cuda::all_reduce_one_shot(view, call, stream);
    if (kind == Kind::two_shot) error = cuda::all_reduce_two_shot(view, call, stream);
    if (kind == Kind::direct) {
      error = cuda::all_reduce_two_shot_direct(view, call, vectors, stream);
    }
    check(error == cudaSuccess, std::string("launch of ") + kKinds[static_cast<size_t>(kind)]);
  }
}

CallShape draw_shape(Rng& rng, uint64_t index) {
  CallShape shape;
  shape.count = size_of_case(index);
  shape.in_place = rng.one_in(2);
  shape.offset = rng.one_in(2) ? 0 : rng.below(9);
  shape.seed = rng.next() >> 8;
  return shape;
}

const std::vector<const Algorithm*>& message_algorithms() {
  static const std::vector<const Algorithm*> all = [] {
    std::vector<const Algorithm*> some;
    for (const Algorithm& row : algorithms()) {
      if (!row.needs_lease) some.push_back(&row);
    }
    return some;
  }();
  return all;
}

// Size of the index-th case where `kinds` kinds take turns: each kind comes to every size.
uint64_t size_index(uint64_t index, uint64_t kinds) {
  return index / kinds + index % kinds * 17;
}

void add_all_reduce(Batch& batch, Rng& rng, uint64_t index, uint32_t sequence) {
  constexpr auto kCount = static_cast<uint64_t>(Kind::kCount);
  CallShape shape = draw_shape(rng, size_index(index, kCount));
  shape.dtype = draw_fast(rng);
  shape.op = rng.one_in(3) ? ReduceOp::avg : ReduceOp::sum;
  shape.contents = Contents::any;  // all of them sum in rank order
  auto kind = static_cast<Kind>(index % kCount);
  const uint64_t limit = cuda::one_shot_ll_limit(batch.group().geometry());
  const bool fits = shape.count * size_of(shape.dtype) <= limit;
  if (kind == Kind::ll && !fits) kind = Kind::one_shot;
  CallData& data = batch.add(shape, kKinds[static_cast<size_t>(kind)]);
  launch_all_reduce(batch.group(), data, kind, sequence);
  data.launch_use(batch.group());
}

// Ranks in blocks or in turns, on up to four hosts: numbered by first appearance.
std::vector<int32_t> draw_hosts(Rng& rng, int32_t world_size) {
  const auto count = static_cast<int32_t>(1 + rng.below(4));
  const bool in_turns = rng.one_in(2);
  std::vector<int32_t> hosts;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    hosts.push_back(in_turns ? rank % count : rank * std::min(count, world_size) / world_size);
  }
  return hosts;
}

void add_program(Batch& batch, Rng& rng, uint64_t index, uint32_t sequence) {
  const auto& rows = message_algorithms();
  const Algorithm& row = *rows[index % rows.size()];
  CallShape shape = draw_shape(rng, size_index(index, rows.size()));
  shape.collective = row.collective;
  const auto world = static_cast<uint64_t>(batch.group().world_size());
  shape.root = static_cast<int32_t>(rng.below(world));
  shape.dtype = rng.one_in(2) ? draw_fast(rng) : draw_reducible(rng);
  const bool reduces = traits_of(row.collective).reduces;
  shape.op = reduces ? draw_op(rng, shape.dtype) : ReduceOp::none;
  if (!reduces) shape.contents = Contents::any;
  if (row.collective == Collective::barrier) shape.count = 0;
  if (rng.one_in(2)) shape.hosts = draw_hosts(rng, batch.group().world_size());
  CallData& data = batch.add(shape, std::string(row.name));
  launch_program(batch.group(), data, std::string(row.name), batch.keep(), sequence);
  data.launch_use(batch.group());
}

}  // namespace

uint64_t size_of_case(uint64_t index) {
  index %= kSizes;
  if (index <= 70) return index;
  index -= 71;
  constexpr std::array<uint64_t, 4> kOdd{777, 1531, 2999, 6007};
  if (index < 18) return (uint64_t{128} << index / 3) - 1 + index % 3;
  return kOdd[index - 18];
}

uint64_t all_reduce_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 101 + 7);
  uint64_t done = 0;
  while (done < cases) {
    Batch batch(settings, rng, draw_world_size(rng));
    for (uint32_t i = 0; i < kCallsPerGroup; ++i, ++done) {
      add_all_reduce(batch, rng, done + settings.seed * 149, i);
    }
    batch.run();
  }
  return done;
}

uint64_t program_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 103 + 11);
  uint64_t done = 0;
  while (done < cases) {
    Batch batch(settings, rng, draw_world_size(rng));
    for (uint32_t i = 0; i < kCallsPerGroup; ++i, ++done) {
      add_program(batch, rng, done + settings.seed * 149, i);
    }
    batch.run();
  }
  return done;
}

uint64_t replay_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 131 + 29);
  constexpr uint32_t kGraphCalls = 6, kEagerCalls = 3;
  constexpr int kReplays = 4;
  uint64_t done = 0;
  while (done < cases) {
    Batch batch(settings, rng, draw_world_size(rng));
    for (int graph = 0; graph < 2; ++graph) {
      for (const uint32_t calls : {kGraphCalls, kEagerCalls}) {
        for (uint32_t i = 0; i < calls; ++i, ++done) {
          if (rng.one_in(2)) {
            add_all_reduce(batch, rng, rng.next() >> 8, i);
          } else {
            add_program(batch, rng, rng.next() >> 8, i);
          }
        }
        calls == kGraphCalls ? batch.replay(kReplays) : batch.run();
        batch.forget();
      }
    }
  }
  return done;
}

}  // namespace pycoll::sim::tests
