// Scenarios for the simulated CUDA runtime. Each is run in a process of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "device/device.cuh"
#include "device/launch.cuh"
#include "sim/control.h"

namespace pycoll::sim::tests {

struct RuntimeScenario {
  std::string name;
  std::string summary;
  std::function<void()> run;  // throws if something is wrong
};

std::vector<RuntimeScenario> memory_scenarios();
std::vector<RuntimeScenario> stream_scenarios();
std::vector<RuntimeScenario> graph_scenarios();
std::vector<RuntimeScenario> error_scenarios();
std::vector<RuntimeScenario> driver_scenarios();
std::vector<RuntimeScenario> process_scenarios();
// For ThreadSanitizer, which must report each of them unless it is ordered.
std::vector<RuntimeScenario> races(bool ordered);

inline void require(bool held, const std::string& what, int line) {
  if (!held) throw std::runtime_error("line " + std::to_string(line) + ": " + what);
}

inline void require_error(cudaError_t got, cudaError_t expected, const char* what, int line) {
  require(
      got == expected,
      std::string(what) + " gave " + cudaGetErrorName(got) + ", not " + cudaGetErrorName(expected),
      line);
}

#define REQUIRE(condition) ::pycoll::sim::tests::require((condition), #condition, __LINE__)
#define OK(call) ::pycoll::sim::tests::require_error((call), cudaSuccess, #call, __LINE__)
#define FAILS(call, code) ::pycoll::sim::tests::require_error((call), (code), #call, __LINE__)

// ---- Kernels: one block of threads goes over n elements. ----

inline __global__ void fill(int* p, int value, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] = value;
}

inline __global__ void add(int* p, int value, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] += value;
}

inline __global__ void copy(int* to, const int* from, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}

inline const device::LaunchShape kBlock{dim3(1), dim3(32)};

inline cudaError_t launch_fill(int* p, int value, int n, cudaStream_t stream) {
  return device::launch(&fill, kBlock, stream, p, value, n);
}
inline cudaError_t launch_add(int* p, int value, int n, cudaStream_t stream) {
  return device::launch(&add, kBlock, stream, p, value, n);
}
inline cudaError_t launch_copy(int* to, const int* from, int n, cudaStream_t stream) {
  return device::launch(&copy, kBlock, stream, to, from, n);
}

// ---- What scenarios work on. ----

inline int* device_ints(int n) {
  void* p = nullptr;
  OK(cudaMalloc(&p, n * sizeof(int)));
  return static_cast<int*>(p);
}

inline int* pinned_ints(int n, int value = 0) {
  void* p = nullptr;
  OK(cudaHostAlloc(&p, n * sizeof(int), cudaHostAllocMapped));
  for (int i = 0; i < n; ++i) static_cast<int*>(p)[i] = value;
  return static_cast<int*>(p);
}

inline cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
  cudaStream_t stream;
  OK(cudaStreamCreateWithFlags(&stream, flags));
  return stream;
}

inline cudaEvent_t new_event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t event;
  OK(cudaEventCreateWithFlags(&event, flags));
  return event;
}

// The stream has work that must not be done yet. It gets its chance: other work, posted later, is.
inline bool keeps_waiting(cudaStream_t stream) {
  cudaStream_t other = new_stream();
  int* p = device_ints(1);
  for (int i = 0; i < 20; ++i) {
    OK(launch_fill(p, i, 1, other));
    OK(cudaStreamSynchronize(other));
  }
  OK(cudaStreamDestroy(other));
  return cudaStreamQuery(stream) == cudaErrorNotReady;
}

// What device memory holds, once all work of the device is done.
inline std::vector<int> read_ints(const int* p, int n) {
  std::vector<int> values(n);
  OK(cudaDeviceSynchronize());
  OK(cudaMemcpy(values.data(), p, n * sizeof(int), cudaMemcpyDefault));
  return values;
}

inline bool all_are(const int* p, int n, int value) {
  return read_ints(p, n) == std::vector<int>(n, value);
}

}  // namespace pycoll::sim::tests
