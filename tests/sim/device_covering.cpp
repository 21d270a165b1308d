// Sets of calls. One has every pair of size, type and number of ranks: each time it is gone
// through, other kernels and algorithms meet other calls. The other has every size for each kernel
// that runs Programs.
#include <array>
#include <set>

#include "device_batch.h"

namespace pycoll::sim::tests {
namespace {

constexpr uint64_t kCallsPerGroup = 16;
constexpr uint64_t kWorlds = kFewThreads ? 5 : 8;
constexpr auto kDTypes = static_cast<uint64_t>(DType::kCount);
// Where packs, lines and rounds end, and some between.
constexpr std::array<uint64_t, 31> kCovered{
    0,  1,  2,  3,  4,   5,   7,   8,   9,   15,  16,  17,   31,   32,   33,  47,
    63, 64, 65, 70, 127, 128, 129, 255, 257, 511, 777, 1024, 1025, 2999, 4097};
static_assert(kDTypes * kCovered.size() == 22 * 31, "SUITES of test_sim_kernels.py");

struct Case {
  uint64_t count;
  DType dtype;
  int32_t world_size;
};

// Every size meets every type; ranks go along so that each pair with them comes up too. By ranks,
// because a group has one number of them.
std::vector<Case> make_covering_set() {
  std::vector<Case> cases;
  for (uint64_t world = 0; world < kWorlds; ++world) {
    for (uint64_t size = 0; size < kCovered.size(); ++size) {
      for (uint64_t dtype = 0; dtype < kDTypes; ++dtype) {
        if ((size + dtype) % kWorlds != world) continue;
        const auto world_size = static_cast<int32_t>(1 + world);
        cases.push_back({kCovered[size], static_cast<DType>(dtype), world_size});
      }
    }
  }
  return cases;
}

void check_pairs(const std::vector<Case>& cases) {
  std::set<std::pair<uint64_t, DType>> size_dtype;
  std::set<std::pair<uint64_t, int32_t>> size_world;
  std::set<std::pair<DType, int32_t>> dtype_world;
  for (const Case& c : cases) {
    size_dtype.emplace(c.count, c.dtype);
    size_world.emplace(c.count, c.world_size);
    dtype_world.emplace(c.dtype, c.world_size);
  }
  check_equal(size_dtype.size(), size_t{kCovered.size() * kDTypes}, "pairs of size and type");
  check_equal(size_world.size(), size_t{kCovered.size() * kWorlds}, "pairs of size and ranks");
  check_equal(dtype_world.size(), size_t{kDTypes * kWorlds}, "pairs of type and ranks");
}

const std::vector<Case>& covering_set() {
  static const std::vector<Case> all = [] {
    std::vector<Case> cases = make_covering_set();
    check_pairs(cases);
    return cases;
  }();
  return all;
}

CallShape shape_of(const Case& c, Collective collective, Rng& rng) {
  CallShape shape = draw_shape(rng, 0, rng.one_in(2));
  shape.count = c.count;
  shape.collective = collective;
  shape.dtype = c.dtype;
  shape.root = static_cast<int32_t>(rng.below(static_cast<uint64_t>(c.world_size)));
  const bool reduces = traits_of(collective).reduces;
  shape.op = reduces ? draw_op(rng, c.dtype) : ReduceOp::none;
  if (!reduces) shape.contents = Contents::any;
  return shape;
}

// Of those that take the type, the turn-th.
const Way& way_for(DType dtype, uint64_t turn) {
  std::vector<const Way*> ways;
  for (const auto* table : {&kernels_by_hand(), &programs()}) {
    for (const Way& way : *table) {
      if (way.takes(dtype) && way.collective != Collective::barrier) ways.push_back(&way);
    }
  }
  return *ways[turn % ways.size()];
}

// The same sizes and types where ranks share a GPU.
void check_shared(const Settings& settings, const Case& c, uint64_t turn, Rng& rng) {
  DeviceGroup group(small_geometry(c.world_size), settings.options());
  group.share_device();
  const bool places = turn % 2 == 0;
  if (find_reduce_kernels(c.dtype, ReduceOp::sum, Isa::baseline) != nullptr && turn % 8 < 6) {
    CallShape shape = shape_of(c, Collective::all_reduce, rng);
    shape.contents = Contents::any;
    check_shared_all_reduce(group, shape, places, rng);
  } else {
    check_shared_gather(group, shape_of(c, Collective::all_gather, rng), places, rng);
  }
}

}  // namespace

// `cases` of them, from where the seed says; in full, if they are as many as there are.
uint64_t covering_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 139 + 37);
  const std::vector<Case>& all = covering_set();
  uint64_t at = settings.seed * 181 % all.size();
  const auto next = [&] { return all[at % all.size()]; };
  for (uint64_t done = 0; done < cases;) {
    const int32_t world_size = next().world_size;
    Batch batch(settings, rng, world_size);
    for (uint64_t i = 0; i < kCallsPerGroup && done < cases; ++i, ++at, ++done) {
      const Case c = next();
      if (c.world_size != world_size) break;
      // The turns of a case and of its neighbours differ from seed to seed.
      const uint64_t turn = at + settings.seed * 7 + rng.below(3);
      const Way& way = way_for(c.dtype, turn);
      CallShape shape = shape_of(c, way.collective, rng);
      if (way.by_hand != nullptr) shape.op = rng.one_in(3) ? ReduceOp::avg : ReduceOp::sum;
      batch.add(shape, way);
      if (turn % 3 == 0) check_shared(settings, c, turn / 3, rng);
    }
    batch.run();
  }
  return cases;
}

// The executor kernel is one for each of these; Programs take turns. Types that no kernel is made
// for share one, as does what only moves bytes.
uint64_t sweep_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 149 + 41);
  constexpr std::array kSums{DType::float32, DType::float16, DType::bfloat16, DType::kCount};
  constexpr uint64_t kKernels = kSums.size() + 1;
  std::array<std::vector<const Way*>, 2> ways;  // that move, that reduce
  for (const Way& way : programs()) {
    if (way.collective == Collective::barrier) continue;
    ways[traits_of(way.collective).reduces].push_back(&way);
  }
  for (uint64_t done = 0; done < cases;) {
    Batch batch(settings, rng, static_cast<int32_t>(1 + (done / kCallsPerGroup) % kWorlds));
    for (uint64_t i = 0; i < kCallsPerGroup; ++i, ++done) {
      const uint64_t kernel = done % kKernels, size = done / kKernels;
      const bool sums = kernel < kSums.size();
      const Way& way = *ways[sums][(size + kernel * 5 + settings.seed) % ways[sums].size()];
      const DType dtype = sums ? kSums[kernel] : static_cast<DType>(size % kDTypes);
      CallShape shape = draw_shape(rng, size, (size + settings.seed) % 2 == 0);
      shape.collective = way.collective;
      shape.root = static_cast<int32_t>(size % static_cast<uint64_t>(batch.world_size()));
      shape.dtype = dtype;
      shape.op = ReduceOp::none;
      if (sums) shape.op = rng.one_in(3) ? ReduceOp::avg : ReduceOp::sum;
      if (dtype == DType::kCount) {
        do {
          shape.dtype = static_cast<DType>(rng.below(kDTypes));
        } while (find_reduce_kernels(shape.dtype, ReduceOp::sum, Isa::baseline) == nullptr);
        shape.op = draw_op(rng, shape.dtype);
      }
      if (!sums) shape.contents = Contents::any;
      batch.add(shape, way);
    }
    batch.run();
  }
  return cases;
}

}  // namespace pycoll::sim::tests
