// What ThreadSanitizer must say, or must not, about kernels that hand data from one thread to
// another. Results are right in all of them on this machine: nothing but a sanitizer sees what is
// missing.
#include <atomic>
#include <memory>
#include <thread>

#include "device/device.cuh"
#include "scenario.h"
#include "sim/timeline.h"

namespace pycoll::sim::tests {
namespace {

using namespace pycoll::device;

// Flags are apart from data: ThreadSanitizer remembers four accesses of each eight bytes, and
// polling would make it forget the one that counts.
template <class T>
struct Apart {
  alignas(64) T value = 0;
};

// ---- One flag: `send` writes data and raises it, `receive` waits and reads. ----

template <Scope kScope, bool kRelease>
__global__ void send(int* data, uint32_t* flag) {
  *data = 42;
  if constexpr (kRelease) {
    store_release<kScope>(flag, 1);
  } else {
    store_relaxed<kScope>(flag, 1);
  }
}

template <Scope kScope, bool kAcquire>
__global__ void receive(const int* data, uint32_t* flag, int* out) {
  if constexpr (kAcquire) {
    while (load_acquire<kScope>(flag) == 0) spin_pause();
  } else {
    while (load_relaxed<kScope>(flag) == 0) spin_pause();
  }
  *out = *data;
}

template <Scope kSend, bool kRelease, Scope kReceive, bool kAcquire>
std::function<void(const Settings&)> message(int from_device, int to_device) {
  return [=](const Settings& settings) {
    int data = 0, out = 0;
    Apart<uint32_t> flag;
    run_grids(settings.options(),
              {grid_of(to_device, dim3(1), dim3(1),
                       [&] { receive<kReceive, kAcquire>(&data, &flag.value, &out); }),
               grid_of(from_device, dim3(1), dim3(1),
                       [&] { send<kSend, kRelease>(&data, &flag.value); })});
    check_equal(out, 42, "what came");
  };
}

// Threads 0 and 1 of one block.
template <Scope kScope>
void message_in_block(const Settings& settings) {
  int data = 0, out = 0;
  Apart<uint32_t> flag;
  run_grids(settings.options(), {grid_of(0, dim3(1), dim3(2), [&] {
              if (threadIdx.x == 0) {
                receive<kScope, true>(&data, &flag.value, &out);
              } else {
                send<kScope, true>(&data, &flag.value);
              }
            })});
  check_equal(out, 42, "what came");
}

// The flag has the sender's release, and then a store that is none of it.
template <bool kSameThread>
void overwritten(const Settings& settings) {
  int data = 0, out = 0;
  Apart<uint32_t> flag;
  run_grids(settings.options(), {grid_of(0, dim3(1), dim3(1),
                                         [&] {
                                           data = 42;
                                           store_release<Scope::system>(&flag.value, 1);
                                           if (kSameThread)
                                             store_relaxed<Scope::system>(&flag.value, 2);
                                         }),
                                 grid_of(1, dim3(1), dim3(1),
                                         [&] {
                                           if (kSameThread) return;
                                           while (load_relaxed<Scope::system>(&flag.value) != 1)
                                             spin_pause();
                                           store_release<Scope::system>(&flag.value, 2);
                                         }),
                                 grid_of(2, dim3(1), dim3(1), [&] {
                                   // Relaxed: an acquire that reads the 1 would be enough.
                                   while (load_relaxed<Scope::system>(&flag.value) != 2)
                                     spin_pause();
                                   load_acquire<Scope::system>(&flag.value);
                                   out = data;
                                 })});
  check_equal(out, 42, "what came");
}

// Each block leaves a part; the last to count itself adds them up.
template <bool kOrdered>
void last_block(const Settings& settings) {
  constexpr int kBlocks = 4;
  int parts[kBlocks] = {}, sum = 0;
  Apart<uint32_t> arrived;
  run_grids(settings.options(), {grid_of(0, dim3(kBlocks), dim3(1), [&] {
              parts[blockIdx.x] = static_cast<int>(blockIdx.x) + 1;
              const uint32_t before = kOrdered
                                          ? fetch_add_acq_rel<Scope::device>(&arrived.value, 1)
                                          : fetch_add_relaxed<Scope::device>(&arrived.value, 1);
              if (before + 1 < kBlocks) return;
              for (const int part : parts) sum += part;
            })});
  check_equal(sum, 10, "sum");
}

// Data and flag in one word; `beside` is what is not in it.
template <bool kInfersMore>
void flag_in_data(const Settings& settings) {
  Apart<uint64_t> line;
  Apart<int> beside;
  int out = 0;
  run_grids(settings.options(),
            {grid_of(0, dim3(1), dim3(1),
                     [&] {
                       beside.value = 42;
                       store_relaxed<Scope::system>(&line.value, 42u | 1ull << 32);
                     }),
             grid_of(1, dim3(1), dim3(1), [&] {
               uint64_t word = 0;
               while ((word = load_relaxed<Scope::system>(&line.value)) >> 32 == 0) {
                 spin_pause();
               }
               out = kInfersMore ? beside.value : static_cast<int>(word);
             })});
  check_equal(out, 42, "what came");
}

// ---- Inside a block. ----

enum class Between { barrier, warp_barrier, shuffle, nothing };

// Each thread reads what its neighbour wrote.
template <Between kBetween>
void neighbours(const Settings& settings) {
  int out[32] = {};
  run_grids(settings.options(), {grid_of(0, dim3(1), dim3(32), [&] {
              PYCOLL_SHARED(int, values, 32);
              const unsigned t = threadIdx.x;
              values[t] = static_cast<int>(t);
              if constexpr (kBetween == Between::barrier) __syncthreads();
              if constexpr (kBetween == Between::warp_barrier) __syncwarp();
              if constexpr (kBetween == Between::shuffle) __shfl_xor_sync(0xffffffffu, t, 1);
              out[t] = values[t ^ 1];
            })});
  if (kBetween != Between::barrier && kBetween != Between::warp_barrier) return;
  for (int t = 0; t < 32; ++t) check_equal(out[t], t ^ 1, "what the neighbour wrote");
}

// ---- What is not ordered although it happens one after the other. ----

void blocks_in_turn(const Settings& settings) {
  int last = 0;
  Options options = settings.options();
  options.max_resident = 1;
  run_grids(options, {grid_of(0, dim3(2), dim3(1), [&] { last = static_cast<int>(blockIdx.x); })});
}

// Their stacks are the same memory, and no race.
void stacks_in_turn(const Settings& settings) {
  int out[12] = {};
  Options options = settings.options();
  options.max_resident = 1;
  run_grids(options, {grid_of(0, dim3(6), dim3(2), [&] {
              int local[16];
              int* volatile escaped = local;  // so that the compiler keeps it in memory
              for (int i = 0; i < 16; ++i) escaped[i] = static_cast<int>(blockIdx.x);
              __syncthreads();
              out[blockIdx.x * 2 + threadIdx.x] = escaped[threadIdx.x];
            })});
  for (int i = 0; i < 12; ++i) check_equal(out[i], i / 2, "block");
}

void signal_from(Timeline& stream, const void* event) {
  stream.enter();
  signal(event);
  stream.leave();
}

// A kernel on one stream reads what a kernel on another wrote, which was done before.
template <bool kEvent>
void streams(const Settings& settings) {
  int data = 0, out = 0;
  char event = 0;
  Timeline first, second;
  Executor executor(settings.options());
  Grid grid = grid_of(0, dim3(1), dim3(1), [&] { data = 42; });
  grid.timeline = &first;
  executor.launch(std::move(grid));
  executor.run();
  // That the OS thread which steps has seen the first orders nothing between the two.
  signal_from(first, &event);
  wait(&event);
  if (kEvent) {
    second.enter();
    wait(&event);
    second.leave();
  }
  grid = grid_of(0, dim3(1), dim3(1), [&] { out = data; });
  grid.timeline = &second;
  executor.launch(std::move(grid));
  executor.run();
  signal_from(second, &event);
  wait(&event);
  check_equal(out, 42, "what came");
}

// ---- The host. ----

void host_reads(const Settings& settings) {
  int data = 0;
  Apart<uint32_t> flag;
  std::thread kernels([&] {
    Options options = settings.options();
    options.external = true;
    run_grids(options, {grid_of(0, dim3(1), dim3(1),
                                [&] { send<Scope::system, true>(&data, &flag.value); })});
  });
  while (std::atomic_ref(flag.value).load(std::memory_order_acquire) == 0)
    std::this_thread::yield();
  const int got = data;
  kernels.join();
  check_equal(got, 42, "what came");
}

}  // namespace

std::vector<Scenario> order_scenarios() {
  constexpr Scope kBlock = Scope::block, kDevice = Scope::device, kSystem = Scope::system;
  return {
      {"order/message", "release and acquire of system scope between devices",
       message<kSystem, true, kSystem, true>(0, 1)},
      {"order/device_scope", "release and acquire of device scope between blocks of a device",
       message<kDevice, true, kDevice, true>(1, 1)},
      {"order/mixed_scopes", "a release of system scope, an acquire of device scope, one device",
       message<kSystem, true, kDevice, true>(1, 1)},
      {"order/block_scope", "release and acquire of block scope in a block",
       message_in_block<kBlock>},
      {"order/last_block", "counting by read-modify-write", last_block<true>},
      {"order/flag_in_data", "one 64-bit word", flag_in_data<false>},
      {"order/barrier", "__syncthreads", neighbours<Between::barrier>},
      {"order/warp_barrier", "__syncwarp", neighbours<Between::warp_barrier>},
      {"order/stacks_in_turn", "blocks on stacks of others", stacks_in_turn},
      {"order/streams_event", "two streams and an event", streams<true>},
      {"order/host_reads", "the host acquires what a kernel released", host_reads},

      {"race/store_relaxed", "the flag is raised without release",
       message<kSystem, false, kSystem, true>(0, 1)},
      {"race/load_relaxed", "the flag is seen without acquire",
       message<kSystem, true, kSystem, false>(0, 1)},
      {"race/release_of_device_scope", "too narrow for another device",
       message<kDevice, true, kSystem, true>(0, 1)},
      {"race/acquire_of_device_scope", "too narrow for another device",
       message<kSystem, true, kDevice, true>(0, 1)},
      {"race/block_scope", "too narrow for another block",
       message<kBlock, true, kBlock, true>(0, 0)},
      {"race/relaxed_store_after", "a relaxed store ends the release", overwritten<true>},
      {"race/another_writer", "the release that is read is another thread's", overwritten<false>},
      {"race/last_block_relaxed", "counting without order", last_block<false>},
      {"race/beside_flag_in_data", "more is inferred from a relaxed word", flag_in_data<true>},
      {"race/no_barrier", "__syncthreads is missing", neighbours<Between::nothing>},
      {"race/shuffle", "a shuffle is no barrier", neighbours<Between::shuffle>},
      {"race/blocks_in_turn", "blocks are not ordered, even one after the other", blocks_in_turn},
      {"race/streams", "two streams without an event", streams<false>},
  };
}

}  // namespace pycoll::sim::tests
