#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "runtime.h"

namespace pycoll::sim::tests {
namespace {

constexpr int kN = 100;

void stream_order() {
  cudaStream_t stream = new_stream();
  int* p = device_ints(kN);
  OK(launch_fill(p, 1, kN, stream));
  for (int i = 0; i < 20; ++i) OK(launch_add(p, 1, kN, stream));
  REQUIRE(all_are(p, kN, 21));
}

// A wait is for what was recorded when it was called, whatever is recorded later.
void event_snapshot() {
  cudaStream_t first = new_stream(), second = new_stream(), waiting = new_stream();
  cudaEvent_t event = new_event();
  int* p = device_ints(kN);
  OK(launch_fill(p, 1, kN, first));
  OK(cudaEventRecord(event, first));
  OK(cudaStreamWaitEvent(waiting, event, 0));
  hold_stream(second);
  OK(cudaEventRecord(event, second));
  OK(launch_add(p, 1, kN, waiting));
  OK(cudaStreamSynchronize(waiting));
  FAILS(cudaEventQuery(event), cudaErrorNotReady);
  OK(cudaEventDestroy(event));  // pending; nobody is hurt
  release_stream(second);
  REQUIRE(all_are(p, kN, 2));
}

void event_order() {
  cudaStream_t writer = new_stream(), reader = new_stream();
  cudaEvent_t event = new_event();
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  delay_stream(writer, std::chrono::milliseconds(20));
  OK(launch_fill(p, 3, kN, writer));
  OK(cudaEventRecord(event, writer));
  OK(cudaStreamWaitEvent(reader, event, 0));
  OK(launch_copy(q, p, kN, reader));
  REQUIRE(all_are(q, kN, 3));
}

void event_states() {
  cudaStream_t stream = new_stream();
  cudaEvent_t never = new_event(), start = new_event(cudaEventDefault);
  cudaEvent_t end = new_event(cudaEventDefault);
  float ms = -1;
  OK(cudaEventQuery(never));
  OK(cudaEventSynchronize(never));
  OK(cudaStreamWaitEvent(stream, never, 0));
  FAILS(cudaEventElapsedTime(&ms, start, end), cudaErrorInvalidResourceHandle);
  OK(cudaEventRecord(start, stream));
  hold_stream(stream);
  OK(cudaEventRecord(end, stream));
  FAILS(cudaEventQuery(end), cudaErrorNotReady);
  FAILS(cudaEventElapsedTime(&ms, start, end), cudaErrorNotReady);
  release_stream(stream);
  OK(cudaEventSynchronize(end));
  OK(cudaEventElapsedTime(&ms, start, end));
  // The start may have been held back too.
  REQUIRE(ms >= 0 && ms < 10000);
  FAILS(cudaEventElapsedTime(&ms, start, never), cudaErrorInvalidResourceHandle);
  OK(cudaEventDestroy(end));
  FAILS(cudaEventDestroy(end), cudaErrorInvalidResourceHandle);
  FAILS(cudaEventRecord(end, stream), cudaErrorInvalidResourceHandle);
}

// The legacy stream comes after all blocking streams and before what they get later; streams that
// are non-blocking have nothing to do with it.
void legacy_stream() {
  cudaStream_t blocking = new_stream(cudaStreamDefault), free_stream = new_stream();
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  hold_stream(blocking);
  OK(launch_fill(p, 1, kN, blocking));
  OK(launch_add(p, 1, kN, cudaStreamLegacy));
  OK(launch_fill(q, 5, kN, free_stream));
  OK(cudaStreamSynchronize(free_stream));
  REQUIRE(keeps_waiting(cudaStreamLegacy));
  release_stream(blocking);
  OK(cudaStreamSynchronize(nullptr));
  hold_stream(cudaStreamLegacy);
  OK(launch_add(p, 1, kN, nullptr));
  OK(launch_add(p, 1, kN, blocking));
  REQUIRE(keeps_waiting(blocking));
  release_stream(cudaStreamLegacy);
  REQUIRE(all_are(p, kN, 4));
  REQUIRE(all_are(q, kN, 5));
}

void thread_stream() {
  int* p = device_ints(kN);
  hold_stream(cudaStreamPerThread);
  OK(launch_fill(p, 1, kN, cudaStreamPerThread));
  std::thread other([] { OK(cudaStreamSynchronize(cudaStreamPerThread)); });  // another stream
  other.join();
  REQUIRE(keeps_waiting(cudaStreamPerThread));
  FAILS(cudaStreamQuery(cudaStreamLegacy), cudaErrorNotReady);
  release_stream(cudaStreamPerThread);
  REQUIRE(all_are(p, kN, 1));
}

struct HostCall {
  int* p;
  int seen = 0;
  cudaError_t inner = cudaSuccess;
};

void host_functions() {
  cudaStream_t stream = new_stream();
  int* p = pinned_ints(kN);
  HostCall call{p};
  OK(launch_fill(p, 6, kN, stream));
  OK(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        auto* of = static_cast<HostCall*>(data);
        of->seen = of->p[kN - 1];
        of->p[0] = 8;
        void* memory = nullptr;
        of->inner = cudaMalloc(&memory, 4);
      },
      &call));
  OK(launch_add(p, 1, 1, stream));
  OK(cudaStreamSynchronize(stream));
  REQUIRE(call.seen == 6);
  REQUIRE(p[0] == 9);
  REQUIRE(call.inner == cudaErrorNotPermitted);
  REQUIRE(counters().host_functions == 1);
}

// A host function that waits keeps its own stream, and nobody else.
void host_function_waits() {
  cudaStream_t stream = new_stream(), other = new_stream();
  int* p = device_ints(kN);
  std::atomic<bool> go{false};
  OK(cudaLaunchHostFunc(
      stream,
      [](void* data) {
        while (!static_cast<std::atomic<bool>*>(data)->load()) std::this_thread::yield();
      },
      &go));
  OK(launch_fill(p, 1, kN, other));
  OK(cudaStreamSynchronize(other));
  REQUIRE(keeps_waiting(stream));
  go = true;
  OK(cudaStreamSynchronize(stream));
}

void destroyed_stream() {
  cudaStream_t stream = new_stream();
  int* p = device_ints(kN);
  delay_stream(stream, std::chrono::milliseconds(20));
  OK(launch_fill(p, 9, kN, stream));
  OK(cudaStreamDestroy(stream));
  REQUIRE(all_are(p, kN, 9));  // and cudaDeviceSynchronize waited for it
  FAILS(launch_fill(p, 1, kN, stream), cudaErrorInvalidResourceHandle);
  FAILS(cudaStreamSynchronize(stream), cudaErrorInvalidResourceHandle);
  FAILS(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  FAILS(cudaStreamDestroy(nullptr), cudaErrorInvalidResourceHandle);
}

void stream_properties() {
  cudaStream_t stream;
  int least = -9, greatest = -9, priority = -9, device = -9;
  unsigned flags = 9;
  OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  REQUIRE(greatest < least);
  OK(cudaSetDevice(2));
  OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest - 1));
  OK(cudaStreamGetPriority(stream, &priority));
  OK(cudaStreamGetFlags(stream, &flags));
  OK(cudaStreamGetDevice(stream, &device));
  REQUIRE(priority == greatest && flags == cudaStreamNonBlocking && device == 2);
  FAILS(cudaStreamCreateWithFlags(&stream, 8), cudaErrorInvalidValue);
}

void other_device() {
  cudaStream_t on_zero = new_stream();
  cudaEvent_t event_of_zero = new_event();
  int* p = device_ints(kN);
  OK(cudaSetDevice(1));
  cudaStream_t on_one = new_stream();
  FAILS(launch_fill(p, 1, kN, on_zero), cudaErrorInvalidResourceHandle);
  FAILS(cudaEventRecord(event_of_zero, on_one), cudaErrorInvalidResourceHandle);
  OK(cudaMemsetAsync(p, 0, 4, on_zero));  // copies go wherever the stream is
  OK(cudaEventRecord(event_of_zero, on_zero));
  OK(cudaStreamWaitEvent(on_one, event_of_zero, 0));
  OK(cudaStreamSynchronize(on_one));
}

// Many threads, streams and events at once; every element is counted up once by each.
void many_threads() {
  constexpr int kThreads = 4, kRounds = 25;
  int* p = device_ints(kN);
  cudaStream_t sum = new_stream();
  OK(launch_fill(p, 0, kN, sum));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      cudaStream_t own = new_stream();
      cudaEvent_t event = new_event();
      int* scratch = device_ints(kN);
      for (int round = 0; round < kRounds; ++round) {
        OK(launch_fill(scratch, round, kN, own));
        OK(cudaEventRecord(event, own));
        OK(cudaStreamWaitEvent(sum, event, 0));
        OK(launch_add(p, 1, kN, sum));
        OK(cudaEventSynchronize(event));
      }
      OK(cudaStreamDestroy(own));
      OK(cudaEventDestroy(event));
      OK(cudaFree(scratch));
    });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(all_are(p, kN, kThreads * kRounds));
}

// What the runtime keeps does not grow with what it has done.
void flat_memory() {
  cudaStream_t stream = new_stream(), other = new_stream(cudaStreamDefault);
  cudaEvent_t event = new_event();
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  OK(launch_fill(p, 1, kN, stream));
  OK(cudaStreamEndCapture(stream, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  const auto rounds = [&](int count) {
    for (int i = 0; i < count; ++i) {
      OK(launch_add(p, 1, kN, stream));
      OK(cudaGraphLaunch(exec, stream));
      OK(cudaEventRecord(event, stream));
      OK(cudaStreamWaitEvent(other, event, 0));
      OK(cudaMemsetAsync(q, 0, 4, other));
      OK(cudaMemsetAsync(q, 0, 4, nullptr));
      OK(cudaStreamWaitEvent(stream, event, 0));
      if (i % 10 == 0) OK(cudaDeviceSynchronize());
    }
    OK(cudaDeviceSynchronize());
    return ::mallinfo2().uordblks;  // nothing, under sanitizers
  };
  const size_t before = rounds(200);
  const size_t after = rounds(2000);
  REQUIRE(counters().launches == 2 * 2200);
  REQUIRE(after < before + (16 << 10));
}

__global__ void wait_for_one(unsigned* flag) {
  while (device::load_acquire<device::Scope::system>(flag) == 0) device::spin_pause();
}

// The process ends all the same.
void unfinished_work() {
  cudaStream_t stream = new_stream(), held = new_stream();
  auto* flag = reinterpret_cast<unsigned*>(pinned_ints(1));
  OK(device::launch(&wait_for_one, device::LaunchShape{dim3(1), dim3(1)}, stream, flag));
  hold_stream(held);
  OK(launch_fill(device_ints(kN), 1, kN, held));
}

// Libraries free what they have when the process ends, after the runtime has.
void call_after_the_end() {
  void* p = nullptr;
  if (cudaMalloc(&p, 4) != cudaErrorCudartUnloading) ::_exit(1);
  if (cudaDeviceSynchronize() != cudaErrorCudartUnloading) ::_exit(1);
}

void after_the_end() {
  std::atexit(call_after_the_end);  // before the first work: it is called after the runtime's own
  unfinished_work();
}

// Nobody waits for ever because another thread ends the process.
void end_while_waiting() {
  std::atexit([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  unfinished_work();
  std::thread([] {
    if (cudaDeviceSynchronize() != cudaErrorCudartUnloading) ::_exit(1);
  }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

}  // namespace

std::vector<RuntimeScenario> stream_scenarios() {
  return {
      {"stream_order", "kernels on a stream run one after another", stream_order},
      {"event_snapshot", "a wait is for the record before it", event_snapshot},
      {"event_order", "what comes after a wait sees what came before the record", event_order},
      {"event_states", "query, synchronise, elapsed time", event_states},
      {"legacy_stream", "the legacy stream and blocking streams", legacy_stream},
      {"thread_stream", "each thread has a stream of its own", thread_stream},
      {"host_functions", "host functions run in order, without the API", host_functions},
      {"host_function_waits", "a host function holds up only its stream", host_function_waits},
      {"destroyed_stream", "pending work goes on, the handle is dead", destroyed_stream},
      {"stream_properties", "priorities, flags, device", stream_properties},
      {"other_device", "streams and events belong to devices", other_device},
      {"flat_memory", "thousands of operations", flat_memory},
      {"unfinished_work", "the process ends before its streams", unfinished_work},
      {"after_the_end", "calls after the runtime has ended", after_the_end},
      {"end_while_waiting", "the process ends while a thread waits", end_while_waiting},
      {"many_threads", "the runtime is called by several threads", many_threads},
  };
}

}  // namespace pycoll::sim::tests
