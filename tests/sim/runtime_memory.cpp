#include <cmath>
#include <cstring>

#include "runtime.h"

namespace pycoll::sim::tests {
namespace {

constexpr int kN = 1000;
constexpr size_t kBytes = kN * sizeof(int);

void allocation() {
  float* p = nullptr;
  OK(cudaMalloc(reinterpret_cast<void**>(&p), 10 * sizeof(float)));
  std::vector<float> values(10);
  OK(cudaMemcpy(values.data(), p, 40, cudaMemcpyDeviceToHost));
  for (const float value : values) REQUIRE(std::isnan(value));
  REQUIRE(counters().allocations == 1 && counters().allocated_bytes == 40);
  FAILS(cudaFree(p + 1), cudaErrorInvalidValue);
  FAILS(cudaFreeHost(p), cudaErrorInvalidValue);
  OK(cudaFree(p));
  FAILS(cudaFree(p), cudaErrorInvalidValue);
  OK(cudaFree(nullptr));
  REQUIRE(counters().allocations == 0);
  void* none = &none;
  OK(cudaMalloc(&none, 0));
  REQUIRE(none == nullptr);
  size_t free_bytes = 0, total = 0;
  OK(cudaMemGetInfo(&free_bytes, &total));
  REQUIRE(free_bytes == total && total > 0);
  FAILS(cudaMalloc(&none, total + 1), cudaErrorMemoryAllocation);
}

cudaPointerAttributes attributes_of(const void* p) {
  cudaPointerAttributes attributes;
  OK(cudaPointerGetAttributes(&attributes, p));
  return attributes;
}

void pointers() {
  OK(cudaSetDevice(3));
  int* device = device_ints(kN);
  int* pinned = pinned_ints(kN);
  std::vector<int> pageable(kN), registered(kN);
  OK(cudaHostRegister(registered.data(), kBytes, cudaHostRegisterDefault));
  OK(cudaSetDevice(0));
  REQUIRE(attributes_of(device + 7).type == cudaMemoryTypeDevice);
  REQUIRE(attributes_of(device + 7).device == 3);
  REQUIRE(attributes_of(device + 7).devicePointer == device + 7);
  REQUIRE(attributes_of(device + kN).type == cudaMemoryTypeUnregistered);
  REQUIRE(attributes_of(pinned + kN - 1).type == cudaMemoryTypeHost);
  REQUIRE(attributes_of(registered.data()).type == cudaMemoryTypeHost);
  REQUIRE(attributes_of(pageable.data()).type == cudaMemoryTypeUnregistered);
  void* mapped = nullptr;
  OK(cudaHostGetDevicePointer(&mapped, pinned, 0));
  REQUIRE(mapped == pinned);
  FAILS(cudaHostGetDevicePointer(&mapped, pageable.data(), 0), cudaErrorInvalidValue);
  FAILS(cudaHostRegister(registered.data() + 1, 4, 0), cudaErrorHostMemoryAlreadyRegistered);
  OK(cudaHostUnregister(registered.data()));
  FAILS(cudaHostUnregister(registered.data()), cudaErrorHostMemoryNotRegistered);
  OK(cudaFreeHost(pinned));
  OK(cudaFree(device));
}

void copy_kinds() {
  int* a = device_ints(kN);
  int* b = device_ints(kN);
  std::vector<int> host(kN, 5), other(kN);
  struct Row {
    void* to;
    const void* from;
    cudaMemcpyKind kind;
  };
  const Row wrong[] = {
      {a, host.data(), cudaMemcpyDeviceToDevice}, {host.data(), a, cudaMemcpyDeviceToDevice},
      {a, host.data(), cudaMemcpyDeviceToHost},   {a, b, cudaMemcpyHostToDevice},
      {host.data(), a, cudaMemcpyHostToDevice},   {a, b, cudaMemcpyDeviceToHost},
      {a, host.data(), cudaMemcpyHostToHost},     {host.data(), a, cudaMemcpyHostToHost},
  };
  for (const Row& row : wrong) {
    FAILS(cudaMemcpyAsync(row.to, row.from, kBytes, row.kind, nullptr), cudaErrorInvalidValue);
  }
  FAILS(cudaMemcpy(a, host.data(), kBytes, static_cast<cudaMemcpyKind>(9)),
        cudaErrorInvalidMemcpyDirection);
  OK(cudaMemcpy(a, host.data(), kBytes, cudaMemcpyHostToDevice));
  OK(cudaMemcpy(b, a, kBytes, cudaMemcpyDeviceToDevice));
  OK(cudaMemcpy(other.data(), b, kBytes, cudaMemcpyDefault));
  REQUIRE(other == host);
  std::vector<int> third(kN);
  OK(cudaMemcpy(third.data(), other.data(), kBytes, cudaMemcpyHostToHost));
  REQUIRE(third == host);
}

void copy_bounds() {
  int* p = device_ints(kN);
  std::vector<int> host(kN + 1, 1);
  FAILS(cudaMemcpy(p, host.data(), kBytes + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  FAILS(cudaMemcpy(p + 1, host.data(), kBytes, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  FAILS(cudaMemset(p + kN - 1, 0, 5), cudaErrorInvalidValue);
  FAILS(cudaMemset(host.data(), 0, 4), cudaErrorInvalidValue);
  OK(cudaMemset(p + kN - 1, 0, 4));
  int* pinned = pinned_ints(kN);
  FAILS(cudaMemcpy(p, pinned, kBytes + 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  OK(cudaFree(p));
  FAILS(cudaMemcpy(p, host.data(), 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
}

// Pageable memory is read before the call returns, pinned memory when the stream gets there.
void copy_timing() {
  cudaStream_t stream = new_stream();
  int* from_pageable = device_ints(kN);
  int* from_pinned = device_ints(kN);
  std::vector<int> pageable(kN, 1);
  int* pinned = pinned_ints(kN, 1);
  hold_stream(stream);
  OK(cudaMemcpyAsync(from_pageable, pageable.data(), kBytes, cudaMemcpyHostToDevice, stream));
  OK(cudaMemcpyAsync(from_pinned, pinned, kBytes, cudaMemcpyHostToDevice, stream));
  pageable.assign(kN, 2);
  for (int i = 0; i < kN; ++i) pinned[i] = 2;
  FAILS(cudaStreamQuery(stream), cudaErrorNotReady);
  release_stream(stream);
  REQUIRE(all_are(from_pageable, kN, 1));
  REQUIRE(all_are(from_pinned, kN, 2));
  std::vector<int> back(kN);
  delay_stream(stream, std::chrono::milliseconds(20));
  OK(cudaMemcpyAsync(back.data(), from_pinned, kBytes, cudaMemcpyDeviceToHost, stream));
  REQUIRE(back == std::vector<int>(kN, 2));  // waited, because the memory is pageable
}

void fills() {
  int* p = device_ints(kN);
  cudaStream_t stream = new_stream();
  OK(cudaMemsetAsync(p, 0, kBytes, stream));
  OK(cudaMemsetAsync(p, 1, kBytes / 2, stream));
  const std::vector<int> values = read_ints(p, kN);
  for (int i = 0; i < kN; ++i) REQUIRE(values[i] == (i < kN / 2 ? 0x01010101 : 0));
}

void stream_ordered() {
  cudaStream_t stream = new_stream();
  void* p = nullptr;
  OK(cudaMallocAsync(&p, kBytes, stream));
  OK(launch_fill(static_cast<int*>(p), 4, kN, stream));
  hold_stream(stream);
  OK(cudaFreeAsync(p, stream));
  std::vector<int> host(kN);
  FAILS(cudaMemcpy(host.data(), p, kBytes, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  FAILS(cudaFreeAsync(p, stream), cudaErrorInvalidValue);
  REQUIRE(counters().allocations == 1);
  release_stream(stream);
  OK(cudaStreamSynchronize(stream));
  REQUIRE(counters().allocations == 0);
  cudaIpcMemHandle_t handle;
  OK(cudaMallocAsync(&p, kBytes, stream));
  FAILS(cudaIpcGetMemHandle(&handle, p), cudaErrorInvalidValue);
}

// The kernel is still to start when cudaFree is called on other memory of the device.
void free_waits() {
  cudaStream_t stream = new_stream();
  int* seen = pinned_ints(1, 0);
  int* other = device_ints(kN);
  delay_stream(stream, std::chrono::milliseconds(50));
  OK(launch_fill(seen, 7, 1, stream));
  OK(cudaFree(other));
  REQUIRE(*seen == 7);
}

void past_the_end() {  // for AddressSanitizer
  cudaStream_t stream = new_stream();
  int* p = device_ints(kN);
  OK(launch_fill(p, 1, kN + 1, stream));
  OK(cudaStreamSynchronize(stream));
}

void addresses_return() {
  const int* first = device_ints(kN);
  const size_t bytes = counters().allocated_bytes;
  OK(cudaFree(const_cast<int*>(first)));
  const int* second = device_ints(kN);
  REQUIRE(counters().allocated_bytes == bytes);
  const std::vector<int> values = read_ints(second, kN);
  for (const int value : values) REQUIRE(value == -1);  // poisoned anew
}

}  // namespace

std::vector<RuntimeScenario> memory_scenarios() {
  return {
      {"allocation", "cudaMalloc and cudaFree: poison, exact sizes, errors", allocation},
      {"pointers", "what cudaPointerGetAttributes knows", pointers},
      {"copy_kinds", "a wrong kind of copy is an error", copy_kinds},
      {"copy_bounds", "a copy that leaves its allocation is an error", copy_bounds},
      {"copy_timing", "which copies are asynchronous", copy_timing},
      {"fills", "cudaMemsetAsync", fills},
      {"stream_ordered", "cudaMallocAsync and cudaFreeAsync", stream_ordered},
      {"free_waits", "cudaFree waits for the device", free_waits},
      {"addresses_return", "freed memory is poisoned when it is given out again", addresses_return},
      {"past_the_end", "a kernel that writes one element too many", past_the_end},
  };
}

}  // namespace pycoll::sim::tests
