// For ThreadSanitizer. Each pair differs in one call that CUDA needs for order. In a run without a
// sanitizer all of them end well, for the engine does one thing after another.
#include "runtime.h"

namespace pycoll::sim::tests {
namespace {

constexpr int kN = 64;
constexpr size_t kBytes = kN * sizeof(int);

// A kernel writes, and on another stream a kernel reads.
void two_kernels(bool event) {
  cudaStream_t writer = new_stream(), reader = new_stream();
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  cudaEvent_t written = new_event();
  OK(launch_fill(p, 1, kN, writer));
  OK(cudaEventRecord(written, writer));
  if (event) OK(cudaStreamWaitEvent(reader, written, 0));
  OK(launch_copy(q, p, kN, reader));
  OK(cudaDeviceSynchronize());
}

void kernel_and_copy(bool event) {
  cudaStream_t writer = new_stream(), copier = new_stream();
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  cudaEvent_t written = new_event();
  OK(launch_fill(p, 1, kN, writer));
  OK(cudaEventRecord(written, writer));
  if (event) OK(cudaStreamWaitEvent(copier, written, 0));
  OK(cudaMemcpyAsync(q, p, kBytes, cudaMemcpyDeviceToDevice, copier));
  OK(cudaDeviceSynchronize());
}

void two_copies(bool event) {
  cudaStream_t first = new_stream(), second = new_stream();
  int* p = device_ints(kN);
  cudaEvent_t done = new_event();
  OK(cudaMemsetAsync(p, 1, kBytes, first));
  OK(cudaEventRecord(done, first));
  if (event) OK(cudaStreamWaitEvent(second, done, 0));
  OK(cudaMemsetAsync(p, 2, kBytes, second));
  OK(cudaDeviceSynchronize());
}

// The record comes too early: what is waited for is not what is read.
void early_record(bool late) {
  cudaStream_t writer = new_stream(), reader = new_stream();
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  cudaEvent_t event = new_event();
  if (!late) OK(cudaEventRecord(event, writer));
  OK(launch_fill(p, 1, kN, writer));
  if (late) OK(cudaEventRecord(event, writer));
  OK(cudaStreamWaitEvent(reader, event, 0));
  OK(launch_copy(q, p, kN, reader));
  OK(cudaDeviceSynchronize());
}

// The host reads what a kernel writes to mapped memory.
void host_reads(bool synchronize) {
  cudaStream_t stream = new_stream(), other = new_stream();
  int* p = pinned_ints(kN);
  OK(launch_fill(p, 1, kN, stream));
  OK(cudaStreamSynchronize(synchronize ? stream : other));
  const int seen = p[kN - 1];
  OK(cudaDeviceSynchronize());
  REQUIRE(seen == 1 || !synchronize);
}

// The host writes into the source of a copy that may still be under way.
void host_writes(bool synchronize) {
  cudaStream_t stream = new_stream();
  int* pinned = pinned_ints(kN);
  int* p = device_ints(kN);
  OK(cudaMemcpyAsync(p, pinned, kBytes, cudaMemcpyHostToDevice, stream));
  if (synchronize) OK(cudaStreamSynchronize(stream));
  pinned[0] = 7;
  OK(cudaStreamSynchronize(stream));
}

void legacy(bool blocking) {
  cudaStream_t stream = new_stream(blocking ? cudaStreamDefault : cudaStreamNonBlocking);
  int* p = device_ints(kN);
  OK(launch_fill(p, 1, kN, stream));
  OK(launch_add(p, 1, kN, cudaStreamLegacy));
  OK(launch_add(p, 1, kN, stream));
  OK(cudaDeviceSynchronize());
}

// Two branches of a graph touch the same memory.
void branches(bool join_first) {
  cudaStream_t main = new_stream(), side = new_stream();
  cudaEvent_t fork = new_event(), join = new_event();
  int* p = device_ints(kN);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(main, cudaStreamCaptureModeRelaxed));
  OK(launch_fill(p, 1, kN, main));
  OK(cudaEventRecord(fork, main));
  OK(cudaStreamWaitEvent(side, fork, 0));
  OK(launch_add(p, 1, kN, side));
  OK(cudaEventRecord(join, side));
  if (join_first) OK(cudaStreamWaitEvent(main, join, 0));
  OK(launch_add(p, 1, kN, main));
  if (!join_first) OK(cudaStreamWaitEvent(main, join, 0));
  OK(cudaStreamEndCapture(main, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) OK(cudaGraphLaunch(exec, main));
  OK(cudaStreamSynchronize(main));
}

void host_function(bool same_stream) {
  cudaStream_t stream = new_stream(), other = new_stream();
  int* p = pinned_ints(kN);
  OK(launch_fill(p, 1, kN, stream));
  OK(cudaLaunchHostFunc(
      same_stream ? stream : other, [](void* data) { static_cast<int*>(data)[0] = 5; }, p));
  OK(cudaDeviceSynchronize());
}

}  // namespace

std::vector<RuntimeScenario> races(bool ordered) {
  struct Pair {
    std::string name;
    std::string summary;
    void (*run)(bool ordered);
  };
  const Pair pairs[] = {
      {"two_kernels", "kernels on two streams, with and without an event", two_kernels},
      {"kernel_and_copy", "a kernel and a copy on two streams", kernel_and_copy},
      {"two_copies", "two fills on two streams", two_copies},
      {"early_record", "an event is recorded before the write", early_record},
      {"host_reads", "the host reads mapped memory", host_reads},
      {"host_writes", "the host writes into the source of a copy", host_writes},
      {"legacy", "the legacy stream and another stream", legacy},
      {"branches", "two branches of a graph", branches},
      {"host_function", "a host function and a kernel", host_function},
  };
  std::vector<RuntimeScenario> all;
  for (const Pair& pair : pairs) {
    all.push_back({pair.name, pair.summary, [run = pair.run, ordered] { run(ordered); }});
  }
  return all;
}

}  // namespace pycoll::sim::tests
