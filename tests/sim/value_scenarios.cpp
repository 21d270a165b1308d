// Kernels compute what CUDA says they do.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include "device/device.cuh"
#include "kernels/element.h"
#include "scenario.h"

namespace pycoll::sim::tests {
namespace {

using namespace pycoll::device;

// ---- Where threads are. ----

__global__ void mark(unsigned* counts) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  counts[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + thread;
}

void geometry(const Settings& settings) {
  const dim3 grid(2, 3, 2), block(5, 3, 4);
  std::vector<unsigned> counts(12 * 60);
  const Stats stats =
      run_grids(settings.options(), {grid_of(0, grid, block, [&] { mark(counts.data()); })});
  for (unsigned i = 0; i < counts.size(); ++i) {
    check_equal(counts[i], 1 + i % 60, "thread " + std::to_string(i));
  }
  check_equal<uint64_t>(stats.threads, 12 * 60, "threads");
}

// ---- Shared memory. ----

// out[b] = sum of the block's part of `in`, by a tree; then each thread reads a neighbour's value.
__global__ void __launch_bounds__(64) block_sum(const float* in, float* out, float* neighbours) {
  PYCOLL_SHARED(float, tree, 64);
  PYCOLL_DYNAMIC_SHARED(float, copy);
  const unsigned t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  tree[t] = copy[t] = in[i];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) tree[t] += tree[t + half];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = tree[0];
  neighbours[i] = copy[(t + 1) % blockDim.x];
}

void shared(const Settings& settings) {
  constexpr int kBlocks = 3, kThreads = 64;
  std::vector<float> in(kBlocks * kThreads), out(kBlocks), neighbours(in.size());
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i * i % 251);
  Options options = settings.options();
  options.max_resident = 2;  // the third gets the memory of one that has ended
  run_grids(options, {grid_of(
                         0, dim3(kBlocks), dim3(kThreads),
                         [&] { block_sum(in.data(), out.data(), neighbours.data()); },
                         kThreads * sizeof(float))});
  for (int b = 0; b < kBlocks; ++b) {
    float sum = 0;
    for (int t = 0; t < kThreads; ++t) {
      const int i = b * kThreads + t;
      sum += in[i];
      check_equal(neighbours[i], in[b * kThreads + (t + 1) % kThreads], "neighbour");
    }
    check_equal(out[b], sum, "sum of a block");
  }
}

// Reading what nobody wrote must not look like a right answer.
__global__ void read_unwritten(float* first, float* second) {
  PYCOLL_SHARED(float, fixed, 4);
  PYCOLL_DYNAMIC_SHARED(float, dynamic);
  first[threadIdx.x] = fixed[threadIdx.x];
  second[threadIdx.x] = dynamic[threadIdx.x];
}

void poison(const Settings& settings) {
  float first[4] = {}, second[4] = {};
  run_grids(settings.options(),
            {grid_of(
                0, dim3(1), dim3(4), [&] { read_unwritten(first, second); }, 16)});
  for (int i = 0; i < 4; ++i) check(std::isnan(first[i]) && std::isnan(second[i]), "not NaN");
}

// ---- Warps. ----

constexpr int kResults = 9;

__global__ void exchange(int* out, unsigned* votes) {
  const int t = static_cast<int>(threadIdx.x), lane = t % 32, value = 1000 + t * t;
  const unsigned all = 0xffffffffu;
  int* const mine = out + t * kResults;
  mine[0] = __shfl_sync(all, value, 31 - lane);
  mine[1] = __shfl_xor_sync(all, value, 5);
  mine[2] = __shfl_down_sync(all, value, 3u);
  mine[3] = __shfl_up_sync(all, value, 3u);
  mine[4] = __shfl_sync(all, value, 2, 8);
  mine[5] = __shfl_down_sync(all, value, 3u, 8);
  mine[6] = __shfl_up_sync(all, value, 3u, 8);
  mine[7] = __shfl_xor_sync(all, value, 9, 8);
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  mine[8] = static_cast<int>(__shfl_xor_sync(half, static_cast<double>(value), 8));
  votes[t * 4] = __ballot_sync(all, value % 3 == 0);
  votes[t * 4 + 1] = __ballot_sync(half, value % 3 == 0);
  votes[t * 4 + 2] = static_cast<unsigned>(__any_sync(half, lane == 20));
  votes[t * 4 + 3] = static_cast<unsigned>(__all_sync(half, lane < 16));
}

void warps(const Settings& settings) {
  constexpr int kThreads = 64;
  std::vector<int> out(kThreads * kResults);
  std::vector<unsigned> votes(kThreads * 4);
  run_grids(settings.options(),
            {grid_of(0, dim3(1), dim3(kThreads), [&] { exchange(out.data(), votes.data()); })});
  for (int t = 0; t < kThreads; ++t) {
    const int lane = t % 32, warp = t - lane, octet = lane / 8 * 8;
    const auto of = [&](int source) { return 1000 + (warp + source) * (warp + source); };
    const int expected[kResults] = {
        of(31 - lane),
        of(lane ^ 5),
        of(lane + 3 < 32 ? lane + 3 : lane),
        of(lane >= 3 ? lane - 3 : lane),
        of(octet + 2),
        of(lane + 3 < octet + 8 ? lane + 3 : lane),
        of(lane - 3 >= octet ? lane - 3 : lane),
        of((lane ^ 9) < octet + 8 ? lane ^ 9 : lane),  // a lane may read from lower segments
        of(lane ^ 8),
    };
    for (int k = 0; k < kResults; ++k) {
      check_equal(out[t * kResults + k], expected[k], "shuffle " + std::to_string(k));
    }
    unsigned ballot = 0;
    for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(of(i) % 3 == 0) << i;
    check_equal(votes[t * 4], ballot, "ballot");
    check_equal(votes[t * 4 + 1], ballot & (lane < 16 ? 0xffffu : 0xffff0000u), "half a ballot");
    check_equal(votes[t * 4 + 2], static_cast<unsigned>(lane >= 16), "any");
    check_equal(votes[t * 4 + 3], static_cast<unsigned>(lane < 16), "all");
  }
}

// The last warp of a block may be short; its mask says so. A lane of one mask may come to another,
// with other lanes, before those wait for it.
__global__ void short_warp(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < 32) {
    out[t] = __shfl_xor_sync(0xffffffffu, t, 1);
  } else {
    if (t >= 34) out[t] = __shfl_xor_sync(0x3cu, t, 6);
    const int other = __shfl_sync(0x3fu, t, 5);
    out[t] = t >= 34 ? out[t] + 100 * other : other;
  }
}

void partial_warps(const Settings& settings) {
  std::vector<int> out(38);
  run_grids(settings.options(), {grid_of(0, dim3(1), dim3(38), [&] { short_warp(out.data()); })});
  for (int t = 0; t < 38; ++t) {
    const int lane = t - 32;
    const int expected = t < 32 ? t ^ 1 : t < 34 ? 37 : 32 + (lane ^ 6) + 3700;
    check_equal(out[t], expected, "thread " + std::to_string(t));
  }
}

// ---- Atomics and packs. ----

__global__ void count(uint32_t* sum, uint64_t* sum64, uint32_t* bits, uint32_t* most,
                      uint64_t* tickets) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  fetch_add_relaxed<Scope::device>(sum, i);
  fetch_or_relaxed<Scope::device>(bits, 1u << (i % 32));
  fetch_max_relaxed<Scope::device>(most, i * 37 % 60);
  tickets[i] = fetch_add_acq_rel<Scope::device>(sum64, uint64_t{1} << 33);
}

void atomics(const Settings& settings) {
  constexpr unsigned kThreads = 3 * 20;
  uint32_t sum = 0, bits = 0, most = 0;
  uint64_t sum64 = 0;
  std::vector<uint64_t> tickets(kThreads);
  run_grids(
      settings.options(),
      {grid_of(0, dim3(3), dim3(20), [&] { count(&sum, &sum64, &bits, &most, tickets.data()); })});
  check_equal(sum, kThreads * (kThreads - 1) / 2, "sum");
  check_equal(sum64, uint64_t{kThreads} << 33, "64-bit sum");
  check_equal(bits, 0xffffffffu, "bits");
  check_equal(most, 59u, "greatest");
  std::vector<bool> seen(kThreads);
  for (const uint64_t ticket : tickets) seen[ticket >> 33] = true;
  for (const bool each : seen) check(each, "a ticket was drawn twice");
}

__global__ void reverse_packs(const uint16_t* in, uint16_t* out, int packs) {
  for (int i = static_cast<int>(threadIdx.x); i < packs; i += static_cast<int>(blockDim.x)) {
    Pack<uint16_t> pack = load_pack(in + i * Pack<uint16_t>::kLength);
    for (int k = 0; k < 4; ++k) std::swap(pack.v[k], pack.v[7 - k]);
    store_pack(out + (packs - 1 - i) * Pack<uint16_t>::kLength, pack);
  }
}

void packs(const Settings& settings) {
  constexpr int kPacks = 37;
  alignas(16) uint16_t in[kPacks * 8], out[kPacks * 8];
  for (int i = 0; i < kPacks * 8; ++i) in[i] = static_cast<uint16_t>(i * 7);
  run_grids(settings.options(),
            {grid_of(0, dim3(1), dim3(10), [&] { reverse_packs(in, out, kPacks); })});
  for (int i = 0; i < kPacks * 8; ++i) {
    check_equal(out[i], in[kPacks * 8 - 1 - i], "element " + std::to_string(i));
  }
}

// ---- Formats agree with those of the CPU's kernels. ----

template <class Device, class Cpu>
void same_format(const char* name) {
  using Bits = decltype(Cpu::bits);
  const auto same = [](float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(a)) == 0;
  };
  for (uint32_t i = 0; i <= std::numeric_limits<Bits>::max(); ++i) {
    const Cpu cpu{static_cast<Bits>(i)};
    check(same(to_float(std::bit_cast<Device>(cpu)), element::to_float32(cpu)),
          std::string(name) + " to float: " + std::to_string(i));
  }
  for (uint64_t i = 0; i < uint64_t{1} << 32; i += 9973) {  // a prime: all exponents, odd mantissas
    const float x = element::bits_as<float>(static_cast<uint32_t>(i));
    const float device = to_float(from_float<Device>(x));
    check(same(device, element::to_float32(element::round_to<Cpu>(x))),
          std::string(name) + " from float: " + std::to_string(x));
  }
}

void formats(const Settings&) {
  same_format<__half, element::Float16>("float16");
  same_format<__nv_bfloat16, element::BFloat16>("bfloat16");
  same_format<__nv_fp8_e4m3, element::Float8E4M3>("float8_e4m3");
  same_format<__nv_fp8_e5m2, element::Float8E5M2>("float8_e5m2");
}

// ---- Several grids, several executors. ----

// What a stream does: each kernel is launched when the one before is done.
void chain(const Settings& settings) {
  constexpr int kLength = 20;
  std::vector<int> values(8, 1);
  Executor executor(settings.options());
  int launched = 0;
  std::function<void()> next = [&] {
    if (launched++ == kLength) return;
    Grid grid = grid_of(0, dim3(2), dim3(4), [&] {
      int& value = values[blockIdx.x * blockDim.x + threadIdx.x];
      value = value * 3 % 1009;
    });
    grid.done = next;
    executor.launch(std::move(grid));
  };
  next();
  executor.run();
  int expected = 1;
  for (int i = 0; i < kLength; ++i) expected = expected * 3 % 1009;
  for (const int value : values) check_equal(value, expected, "after the chain");
}

// A token goes round the ranks; each adds its own to the payload.
__global__ void pass_token(uint32_t* mine, uint32_t* next, const int* from, int* to, int rank,
                           uint32_t rounds) {
  for (uint32_t round = 1; round <= rounds; ++round) {
    if (threadIdx.x == 0) {
      if (rank != 0 || round > 1) {
        const uint32_t wanted = rank == 0 ? round - 1 : round;
        while (static_cast<int32_t>(load_acquire<Scope::system>(mine) - wanted) < 0) spin_pause();
      }
    }
    __syncthreads();
    to[threadIdx.x] = from[threadIdx.x] + rank + static_cast<int>(threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) store_release<Scope::system>(next, round);
  }
}

template <int kRanks, int kThreads, int kRounds>
struct Token {
  uint32_t flags[kRanks] = {};
  int payload[kRanks][kThreads] = {};

  Grid grid(int rank) {
    const int next = (rank + 1) % kRanks;
    return grid_of(rank, dim3(1), dim3(kThreads), [this, rank, next] {
      pass_token(&flags[rank], &flags[next], payload[rank], payload[next], rank, kRounds);
    });
  }
  void check_payload() const {
    for (int t = 0; t < kThreads; ++t) {
      check_equal(payload[0][t], kRounds * (kRanks * (kRanks - 1) / 2 + kRanks * t), "payload");
    }
  }
};

void ring(const Settings& settings) {
  Token<3, 8, 25> token;
  run_grids(settings.options(), {token.grid(0), token.grid(1), token.grid(2)});
  token.check_payload();
}

// As many threads as ThreadSanitizer is meant to take, several times over.
void crowd(const Settings& settings) {
  constexpr int kRanks = 7;
  Options options = settings.options();
  Executor executor(options);
  for (int launch = 0; launch < 4; ++launch) {
    Token<kRanks, 32, 10> token;
    for (int rank = 0; rank < kRanks; ++rank) executor.launch(token.grid(rank));
    executor.run();
    token.check_payload();
  }
}

void executors(const Settings& settings) {
  constexpr int kRanks = 3;
  Token<kRanks, 8, 25> token;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      Options options = settings.options();
      options.seed += static_cast<uint64_t>(rank);
      options.external = true;
      run_grids(options, {token.grid(rank)});
    });
  }
  for (std::thread& rank : ranks) rank.join();
  token.check_payload();
}

}  // namespace

std::vector<Scenario> value_scenarios() {
  return {
      {"value/geometry", "three-dimensional grids and blocks", geometry},
      {"value/shared", "static and dynamic shared memory between barriers", shared},
      {"value/poison", "shared memory that nobody wrote is NaN", poison},
      {"value/warps", "shuffles and votes of all kinds", warps},
      {"value/partial_warps", "a last warp of 6 lanes; masks that overlap", partial_warps},
      {"value/atomics", "sums, tickets and bits over three blocks", atomics},
      {"value/packs", "16 bytes at a time", packs},
      {"value/formats", "every 16 and 8-bit float, and floats of all magnitudes", formats},
      {"value/chain", "kernels that are launched when others are done", chain},
      {"value/ring", "a token round three devices", ring},
      {"value/crowd", "a token round seven devices of 32 threads, four times", crowd},
      {"value/executors", "the same with an OS thread and an executor for each", executors},
  };
}

}  // namespace pycoll::sim::tests
