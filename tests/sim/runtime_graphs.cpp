#include <thread>

#include "runtime.h"

namespace pycoll::sim::tests {
namespace {

constexpr int kN = 100;

cudaGraphExec_t instantiate(cudaGraph_t graph) {
  cudaGraphExec_t exec;
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaGraphDestroy(graph));
  return exec;
}

cudaGraphExec_t end_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  OK(cudaStreamEndCapture(stream, &graph));
  return instantiate(graph);
}

// Nothing runs while it is captured; arguments are those of that time.
void replay() {
  cudaStream_t stream = new_stream();
  int* p = device_ints(kN);
  OK(launch_fill(p, 0, kN, stream));
  OK(cudaStreamSynchronize(stream));
  int value = 2;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  OK(launch_add(p, value, kN, stream));
  value = 100;
  OK(launch_add(p, 1, kN, stream));
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  OK(cudaStreamIsCapturing(stream, &status));
  REQUIRE(status == cudaStreamCaptureStatusActive);
  OK(cudaStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr));
  REQUIRE(status == cudaStreamCaptureStatusActive && id != 0);
  cudaGraph_t graph = nullptr;
  OK(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  OK(cudaGraphGetNodes(graph, nullptr, &nodes));
  REQUIRE(nodes == 2);
  cudaGraphExec_t exec = instantiate(graph);
  REQUIRE(all_are(p, kN, 0));
  for (int i = 0; i < 50; ++i) {
    OK(cudaGraphLaunch(exec, stream));
    if (i % 10 == 0) OK(launch_add(p, 1000, kN, stream));  // eager calls in between
  }
  OK(cudaGraphExecDestroy(exec));  // launches under way go on
  REQUIRE(all_are(p, kN, 50 * 3 + 5 * 1000));
  REQUIRE(counters().graph_launches == 50);
  FAILS(cudaGraphLaunch(exec, stream), cudaErrorInvalidValue);
}

// Two streams inside of one capture: forked by an event, joined by another.
void fork_and_join() {
  cudaStream_t main = new_stream(), side = new_stream();
  cudaEvent_t fork = new_event(), join = new_event();
  int* a = device_ints(kN);
  int* b = device_ints(kN);
  int* c = device_ints(kN);
  int* host = pinned_ints(kN);
  OK(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
  OK(launch_fill(a, 1, kN, main));
  OK(cudaEventRecord(fork, main));
  OK(cudaStreamWaitEvent(side, fork, 0));
  OK(launch_copy(b, a, kN, side));
  OK(launch_add(b, 10, kN, side));
  OK(cudaEventRecord(join, side));
  OK(launch_copy(c, a, kN, main));
  OK(launch_add(c, 20, kN, main));
  OK(cudaStreamWaitEvent(main, join, 0));
  OK(cudaMemcpyAsync(host, b, kN * sizeof(int), cudaMemcpyDeviceToHost, main));
  OK(launch_add(c, 1, kN, main));
  cudaStreamCaptureStatus status;
  OK(cudaStreamIsCapturing(side, &status));
  REQUIRE(status == cudaStreamCaptureStatusActive);
  cudaGraphExec_t exec = end_capture(main);
  OK(cudaStreamIsCapturing(side, &status));
  REQUIRE(status == cudaStreamCaptureStatusNone);
  for (int i = 0; i < 3; ++i) OK(cudaGraphLaunch(exec, main));
  REQUIRE(all_are(c, kN, 22));
  REQUIRE(all_are(b, kN, 11));
  for (int i = 0; i < kN; ++i) REQUIRE(host[i] == 11);
  FAILS(cudaEventQuery(fork), cudaErrorCapturedEvent);
  OK(cudaEventRecord(fork, main));  // usable again
  OK(cudaEventSynchronize(fork));
}

// One executable graph never runs twice at a time, on whatever streams.
void launches_are_ordered() {
  cudaStream_t first = new_stream(), second = new_stream();
  int* p = device_ints(kN);
  OK(launch_fill(p, 0, kN, first));
  OK(cudaStreamSynchronize(first));
  OK(cudaStreamBeginCapture(first, cudaStreamCaptureModeRelaxed));
  OK(launch_add(p, 1, kN, first));
  cudaGraphExec_t exec = end_capture(first);
  hold_stream(first);
  OK(cudaGraphLaunch(exec, first));
  OK(cudaGraphLaunch(exec, second));
  REQUIRE(keeps_waiting(second));
  release_stream(first);
  REQUIRE(all_are(p, kN, 2));
}

void embedded() {
  cudaStream_t stream = new_stream();
  int* p = device_ints(kN);
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  OK(launch_add(p, 1, kN, stream));
  OK(launch_add(p, 1, kN, stream));
  cudaGraphExec_t inner = end_capture(stream);
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  OK(launch_fill(p, 0, kN, stream));
  OK(cudaGraphLaunch(inner, stream));
  OK(cudaGraphLaunch(inner, stream));
  OK(launch_add(p, 10, kN, stream));
  cudaGraphExec_t outer = end_capture(stream);
  OK(cudaGraphLaunch(outer, stream));
  REQUIRE(all_are(p, kN, 14));
}

// Events that a graph records and waits for itself.
void external_events() {
  cudaStream_t stream = new_stream(), other = new_stream();
  cudaEvent_t before = new_event(), after = new_event();
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  FAILS(cudaEventRecordWithFlags(after, stream, cudaEventRecordExternal), cudaErrorInvalidValue);
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  OK(cudaStreamWaitEvent(stream, before, cudaEventWaitExternal));
  OK(launch_add(p, 1, kN, stream));
  OK(cudaEventRecordWithFlags(after, stream, cudaEventRecordExternal));
  cudaGraphExec_t exec = end_capture(stream);
  for (int i = 0; i < 3; ++i) {
    delay_stream(other, std::chrono::milliseconds(2));
    OK(launch_fill(p, 10 * i, kN, other));
    OK(cudaEventRecord(before, other));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamWaitEvent(other, after, 0));
    OK(launch_copy(q, p, kN, other));
    REQUIRE(all_are(q, kN, 10 * i + 1));
  }
}

cudaStream_t capturing(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal,
                       unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream = new_stream(flags);
  OK(cudaStreamBeginCapture(stream, mode));
  return stream;
}

void ends_with(cudaStream_t stream, cudaError_t code) {
  cudaGraph_t graph = nullptr;
  FAILS(cudaStreamEndCapture(stream, &graph), code);
  REQUIRE(graph == nullptr);
}

void capture_errors() {
  int* p = device_ints(kN);
  void* memory = nullptr;
  std::vector<int> pageable(kN);
  FAILS(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
        cudaErrorStreamCaptureUnsupported);
  cudaStream_t s = new_stream();
  ends_with(s, cudaErrorIllegalState);

  s = capturing();
  FAILS(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), cudaErrorIllegalState);
  FAILS(cudaStreamSynchronize(s), cudaErrorStreamCaptureUnsupported);
  FAILS(launch_add(p, 1, kN, s), cudaErrorStreamCaptureInvalidated);
  ends_with(s, cudaErrorStreamCaptureInvalidated);

  const auto refused = [&](auto&& call) {
    cudaStream_t stream = capturing();
    FAILS(call(), cudaErrorStreamCaptureUnsupported);
    ends_with(stream, cudaErrorStreamCaptureInvalidated);
  };
  cudaEvent_t event = new_event();
  refused([&] { return cudaMalloc(&memory, 4); });
  refused([&] { return cudaFree(p); });
  refused([&] { return cudaHostAlloc(&memory, 4, 0); });
  refused([&] { return cudaDeviceSynchronize(); });
  refused([&] { return cudaEventQuery(event); });
  refused([&] { return cudaEventSynchronize(event); });
  refused([&] { return cudaMemcpy(pageable.data(), p, 4, cudaMemcpyDeviceToHost); });

  s = capturing();
  FAILS(cudaMemcpyAsync(p, pageable.data(), 4, cudaMemcpyHostToDevice, s),
        cudaErrorStreamCaptureUnsupported);
  ends_with(s, cudaErrorStreamCaptureInvalidated);

  s = capturing(cudaStreamCaptureModeRelaxed);  // all of it is the caller's business then
  OK(cudaMalloc(&memory, 4));
  OK(cudaEventQuery(event));
  OK(cudaFree(memory));
  cudaGraph_t graph;
  OK(cudaStreamEndCapture(s, &graph));
}

void boundary_errors() {
  int* p = device_ints(kN);
  cudaStream_t outside = new_stream();
  cudaEvent_t recorded = new_event(), never = new_event();
  OK(cudaEventRecord(recorded, outside));
  cudaStream_t s = capturing();
  OK(cudaStreamWaitEvent(s, never, 0));
  FAILS(cudaStreamWaitEvent(s, recorded, 0), cudaErrorStreamCaptureIsolation);
  ends_with(s, cudaErrorStreamCaptureInvalidated);

  s = capturing();  // a fork that is never joined
  cudaStream_t side = new_stream();
  cudaEvent_t fork = new_event();
  OK(launch_add(p, 1, kN, s));
  OK(cudaEventRecord(fork, s));
  OK(cudaStreamWaitEvent(side, fork, 0));
  OK(launch_add(p, 1, kN, side));
  FAILS(cudaStreamSynchronize(side), cudaErrorStreamCaptureUnsupported);
  ends_with(s, cudaErrorStreamCaptureInvalidated);
  s = capturing();
  OK(cudaEventRecord(fork, s));
  OK(cudaStreamWaitEvent(side, fork, 0));
  OK(launch_add(p, 1, kN, side));
  ends_with(side, cudaErrorStreamCaptureUnmatched);
  ends_with(s, cudaErrorStreamCaptureInvalidated);
  s = capturing();
  OK(cudaEventRecord(fork, s));
  OK(cudaStreamWaitEvent(side, fork, 0));
  OK(launch_add(p, 1, kN, side));
  ends_with(s, cudaErrorStreamCaptureUnjoined);
  OK(launch_fill(p, 1, kN, side));  // all streams are free again
  REQUIRE(all_are(p, kN, 1));

  s = capturing(cudaStreamCaptureModeRelaxed);  // two captures
  cudaStream_t t = capturing(cudaStreamCaptureModeRelaxed);
  OK(cudaEventRecord(fork, s));
  FAILS(cudaStreamWaitEvent(t, fork, 0), cudaErrorStreamCaptureMerge);
  ends_with(s, cudaErrorStreamCaptureInvalidated);
  ends_with(t, cudaErrorStreamCaptureInvalidated);

  s = capturing(cudaStreamCaptureModeRelaxed, cudaStreamDefault);  // ordered with the legacy one
  FAILS(launch_add(p, 1, kN, nullptr), cudaErrorStreamCaptureImplicit);
  ends_with(s, cudaErrorStreamCaptureInvalidated);
  s = capturing(cudaStreamCaptureModeRelaxed);
  OK(launch_add(p, 1, kN, nullptr));  // not with a non-blocking one
  OK(cudaEventRecord(fork, s));
  FAILS(cudaStreamWaitEvent(nullptr, fork, 0), cudaErrorStreamCaptureImplicit);
  ends_with(s, cudaErrorStreamCaptureInvalidated);
}

cudaError_t in_thread(const std::function<cudaError_t()>& call) {
  cudaError_t result = cudaSuccess;
  std::thread([&] { result = call(); }).join();
  return result;
}

void capture_and_threads() {
  cudaEvent_t event = new_event();
  const auto query = [&] { return cudaEventQuery(event); };
  const auto query_relaxed = [&] {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    REQUIRE(mode == cudaStreamCaptureModeGlobal);
    return cudaEventQuery(event);
  };
  cudaGraph_t graph = nullptr;
  cudaStream_t s = capturing(cudaStreamCaptureModeGlobal);
  OK(in_thread(query_relaxed));
  FAILS(in_thread(query), cudaErrorStreamCaptureUnsupported);  // and the capture is spoilt
  ends_with(s, cudaErrorStreamCaptureInvalidated);
  s = capturing(cudaStreamCaptureModeThreadLocal);
  OK(in_thread(query));
  FAILS(in_thread([&] { return cudaStreamEndCapture(s, &graph); }),
        cudaErrorStreamCaptureWrongThread);
  OK(cudaStreamEndCapture(s, &graph));
  s = capturing(cudaStreamCaptureModeRelaxed);
  OK(in_thread([&] { return cudaStreamEndCapture(s, &graph); }));
}

}  // namespace

std::vector<RuntimeScenario> graph_scenarios() {
  return {
      {"replay", "a captured stream, replayed among eager calls", replay},
      {"fork_and_join", "a capture over two streams", fork_and_join},
      {"launches_are_ordered", "a graph does not run twice at a time", launches_are_ordered},
      {"embedded", "a graph that is launched into a capture", embedded},
      {"external_events", "event nodes", external_events},
      {"capture_errors", "what captures forbid", capture_errors},
      {"boundary_errors", "order across the boundary of a capture", boundary_errors},
      {"capture_and_threads", "what other threads may do", capture_and_threads},
  };
}

}  // namespace pycoll::sim::tests
