// After a barrier everybody sees what anybody did before it: whatever algorithm, call after call.
#include <array>

#include "device/device.cuh"
#include "device/launch.cuh"
#include "device_scenarios.h"

namespace pycoll::sim::tests {
namespace {

using stress::Rng;

constexpr size_t kRounds = 8;
struct Marks {
  std::array<std::array<uint32_t, cuda::kMaxRanks>, kRounds> of_round{};
};

// Plain accesses: without a barrier between them they are a race.
__global__ void mark(Marks* marks, size_t round, int32_t rank) {
  if (threadIdx.x == 0) marks->of_round[round][static_cast<size_t>(rank)] = 1;
}

__global__ void count(const Marks* marks, size_t round, uint32_t* seen) {
  if (threadIdx.x != 0) return;
  for (const uint32_t mark : marks->of_round[round]) *seen += mark;
}

}  // namespace

uint64_t barrier_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 137 + 31);
  std::vector<std::string> names;
  for (const Algorithm& row : algorithms()) {
    if (row.collective == Collective::barrier) names.emplace_back(row.name);
  }
  for (uint64_t done = 0; done < cases; ++done) {
    const auto world_size = static_cast<int32_t>(1 + rng.below(5));
    cuda::Geometry geometry = small_geometry(world_size);
    geometry.threads = 8;
    DeviceGroup group(geometry, settings.options());
    CallShape shape;
    shape.collective = Collective::barrier;
    shape.op = ReduceOp::none;
    const CallData nothing(shape, world_size);
    Keep keep;
    Marks marks;
    std::array<std::array<uint32_t, cuda::kMaxRanks>, kRounds> seen{};
    const device::LaunchShape one{dim3(1), dim3(8)};
    for (size_t round = 0; round < kRounds; ++round) {
      for (int32_t rank = 0; rank < world_size; ++rank) {
        check(device::launch(&mark, one, group.stream(rank), &marks, round, rank) == cudaSuccess,
              "launch of mark");
      }
      const std::string& name = names[rng.below(names.size())];
      launch_program(group, nothing, name, keep, static_cast<uint32_t>(round));
      for (int32_t rank = 0; rank < world_size; ++rank) {
        uint32_t* to = &seen[round][static_cast<size_t>(rank)];
        check(device::launch(&count, one, group.stream(rank), &marks, round, to) == cudaSuccess,
              "launch of count");
      }
    }
    group.run();
    for (size_t round = 0; round < kRounds; ++round) {
      for (int32_t rank = 0; rank < world_size; ++rank) {
        check_equal(seen[round][static_cast<size_t>(rank)], static_cast<uint32_t>(world_size),
                    "ranks that rank " + std::to_string(rank) + " saw after barrier " +
                        std::to_string(round));
      }
    }
  }
  return cases;
}

}  // namespace pycoll::sim::tests
