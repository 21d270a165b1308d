// Kernels that do what hardware leaves undefined or hangs in, each with what must be reported. A
// scenario that returns was not caught.
#include <memory>

#include "device/device.cuh"
#include "scenario.h"

namespace pycoll::sim::tests {
namespace {

using namespace pycoll::device;

std::function<void(const Settings&)> kernel(dim3 blocks, dim3 threads, std::function<void()> body,
                                            size_t shared_bytes = 0) {
  return [=](const Settings& settings) {
    run_grids(settings.options(), {grid_of(0, blocks, threads, body, shared_bytes)});
  };
}

void divergent_barriers() {
  if (threadIdx.x < 5) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void exit_before_barrier() {
  if (threadIdx.x == 3) return;
  __syncthreads();
}

void lane_exits() {
  if (threadIdx.x == 7) return;
  __shfl_xor_sync(0xffffffffu, 1, 1);
}

void not_in_own_mask() {
  __ballot_sync(0x0000fffeu, 1);
}

void lanes_that_are_not_there() {
  __ballot_sync(0xffffffffu, 1);
}

void different_operations() {
  if (threadIdx.x < 16) {
    __shfl_xor_sync(0xffffffffu, 1, 1);
  } else {
    __ballot_sync(0xffffffffu, 1);
  }
}

void half_waits_at_barrier() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncwarp(0xffffffffu);
  }
}

void flag_never_raised(const Settings& settings) {
  uint32_t flag = 0;
  run_grids(settings.options(), {grid_of(0, dim3(2), dim3(3), [&] {
              if (threadIdx.x == 0 && blockIdx.x == 1) {
                while (load_acquire<Scope::device>(&flag) == 0) spin_pause();
              }
              __syncthreads();
            })});
}

// Blocks wait for one that has no room while they run.
void not_resident(const Settings& settings) {
  uint32_t arrived = 0;
  Options options = settings.options();
  options.max_resident = 2;
  run_grids(options, {grid_of(0, dim3(3), dim3(1), [&] {
              fetch_add_acq_rel<Scope::device>(&arrived, 1);
              while (load_acquire<Scope::device>(&arrived) < 3) spin_pause();
            })});
}

void nobody_outside(const Settings& settings) {
  uint32_t flag = 0;
  Options options = settings.options();
  options.external = true;
  options.timeout_s = 0.2;
  run_grids(options, {grid_of(0, dim3(1), dim3(1), [&] {
              while (load_acquire<Scope::system>(&flag) == 0) spin_pause();
            })});
}

void misaligned_pack() {
  alignas(16) float values[8] = {};
  const Pack<float> pack = load_pack(values + 1);
  store_pack(values + 4, pack);
}

void misaligned_flag() {
  alignas(8) unsigned char bytes[16] = {};
  load_relaxed<Scope::system>(reinterpret_cast<uint64_t*>(bytes + 4));
}

// ---- Out of bounds: AddressSanitizer's. ----

void beyond_static() {
  PYCOLL_SHARED(int, values, 5);
  int* const p = values;
  p[threadIdx.x] = 1;  // the block has a thread more
}

void beyond_dynamic() {
  PYCOLL_DYNAMIC_SHARED(int, values);
  values[threadIdx.x] = 1;
}

void beyond_global(const Settings& settings) {
  const auto values = std::make_unique<float[]>(7);
  float* const p = values.get();
  run_grids(
      settings.options(),
      {grid_of(0, dim3(1), dim3(8), [=] { p[threadIdx.x] = static_cast<float>(threadIdx.x); })});
}

}  // namespace

std::vector<Scenario> fault_scenarios() {
  return {
      {"fault/divergent_barriers", "threads at different __syncthreads",
       kernel(dim3(1), dim3(8), divergent_barriers)},
      {"fault/exit_before_barrier", "a thread exits, the others wait",
       kernel(dim3(1), dim3(8), exit_before_barrier)},
      {"fault/lane_exits", "a lane exits, the mask names it",
       kernel(dim3(1), dim3(32), lane_exits)},
      {"fault/not_in_own_mask", "lane 0 leaves itself out",
       kernel(dim3(1), dim3(16), not_in_own_mask)},
      {"fault/lanes_that_are_not_there", "a full mask in a warp of 16",
       kernel(dim3(1), dim3(16), lanes_that_are_not_there)},
      {"fault/different_operations", "half shuffles, half votes",
       kernel(dim3(1), dim3(32), different_operations)},
      {"fault/half_waits_at_barrier", "half at __syncthreads, half at __syncwarp",
       kernel(dim3(1), dim3(32), half_waits_at_barrier)},
      {"fault/flag_never_raised", "one thread spins for ever, its block waits for it",
       flag_never_raised},
      {"fault/not_resident", "a barrier of three blocks with room for two", not_resident},
      {"fault/nobody_outside", "a peer outside never comes", nobody_outside},
      {"fault/misaligned_pack", "16 bytes at 4", kernel(dim3(1), dim3(1), misaligned_pack)},
      {"fault/misaligned_flag", "8 bytes at 4", kernel(dim3(1), dim3(1), misaligned_flag)},
      {"fault/invalid_launch", "1025 threads in a block", kernel(dim3(1), dim3(1025), [] {})},
      {"bounds/static", "static shared memory", kernel(dim3(1), dim3(6), beyond_static)},
      {"bounds/dynamic", "dynamic shared memory", kernel(dim3(1), dim3(6), beyond_dynamic, 20)},
      {"bounds/global", "memory of the host's allocator", beyond_global},
  };
}

}  // namespace pycoll::sim::tests
