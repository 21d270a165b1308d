// Collectives of ranks on different devices: hand-made kernels and Programs, many calls of a group
// one after the other, so that what a call leaves in windows, slots and counters meets the next.
#include <algorithm>
#include <array>

#include "device_batch.h"

namespace pycoll::sim::tests {
namespace {

// Waits of a group that is alive are short.
constexpr uint32_t kCallsPerGroup = 16;

// Up to 8 ranks most of the time, now and then as many as kernels can reach.
int32_t draw_world_size(Rng& rng) {
  if (kFewThreads) return static_cast<int32_t>(1 + rng.below(5));
  const bool many = rng.one_in(12);
  return static_cast<int32_t>(many ? 9 + rng.below(cuda::kMaxRanks - 8) : 1 + rng.below(8));
}

DType draw_reducible(Rng& rng) {
  for (;;) {
    const auto dtype = static_cast<DType>(rng.below(static_cast<uint64_t>(DType::kCount)));
    if (find_reduce_kernels(dtype, ReduceOp::sum, Isa::baseline) != nullptr) return dtype;
  }
}

constexpr std::array kFast{DType::float32, DType::float16, DType::bfloat16};

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

// Sizes that were aligned with one seed are not with the next.
struct Turn {
  uint64_t index;
  uint64_t seed;
};
CallShape draw_turn(Rng& rng, const Turn& turn, uint64_t kinds) {
  const uint64_t size = size_index(turn.index, kinds);
  return draw_shape(rng, size, (size + turn.seed) % 2 == 0);
}

// Each kernel is one for each of three types.
void add_all_reduce(Batch& batch, Rng& rng, const Turn& turn) {
  const std::vector<Way>& ways = kernels_by_hand();
  CallShape shape = draw_turn(rng, turn, ways.size() * kFast.size());
  shape.dtype = kFast[turn.index / ways.size() % kFast.size()];
  shape.op = rng.one_in(3) ? ReduceOp::avg : ReduceOp::sum;
  shape.contents = Contents::any;  // all of them sum in rank order
  batch.add(shape, ways[turn.index % ways.size()]);
}

void add_program(Batch& batch, Rng& rng, const Turn& turn) {
  const std::vector<Way>& ways = programs();
  const Way& way = ways[turn.index % ways.size()];
  CallShape shape = draw_turn(rng, turn, ways.size());
  shape.collective = way.collective;
  shape.root = static_cast<int32_t>(rng.below(static_cast<uint64_t>(batch.world_size())));
  shape.dtype = rng.one_in(2) ? kFast[rng.below(kFast.size())] : draw_reducible(rng);
  const bool reduces = traits_of(way.collective).reduces;
  shape.op = reduces ? draw_op(rng, shape.dtype) : ReduceOp::none;
  if (!reduces) shape.contents = Contents::any;
  if (way.collective == Collective::barrier) shape.count = 0;
  if (rng.one_in(2)) shape.hosts = draw_hosts(rng, batch.world_size());
  batch.add(shape, way);
}

uint64_t run_batches(const Settings& settings, Rng& rng, uint64_t cases,
                     void (*add)(Batch&, Rng&, const Turn&)) {
  uint64_t done = 0;
  while (done < cases) {
    Batch batch(settings, rng, draw_world_size(rng));
    for (uint32_t i = 0; i < kCallsPerGroup; ++i, ++done) {
      add(batch, rng, {done + settings.seed * 149, settings.seed});
    }
    batch.run();
  }
  return done;
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
  // Blocks with one index wait for each other and for nobody else: any number of them may be
  // resident.
  Settings some = settings;
  some.max_resident = rng.one_in(2) ? 1 + static_cast<unsigned>(rng.below(4)) : 0;
  return run_batches(some, rng, cases, &add_all_reduce);
}

uint64_t program_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 103 + 11);
  return run_batches(settings, rng, cases, &add_program);
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
          const auto add = rng.one_in(2) ? &add_all_reduce : &add_program;
          add(batch, rng, {rng.next() >> 8, settings.seed});
        }
        calls == kGraphCalls ? batch.replay(kReplays) : batch.run();
        batch.forget();
      }
    }
  }
  return done;
}

}  // namespace pycoll::sim::tests
