#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "runtime.h"

namespace pycoll::sim::tests {
namespace {

constexpr int kN = 100;

void names() {
  REQUIRE(std::string(cudaGetErrorName(cudaErrorIllegalAddress)) == "cudaErrorIllegalAddress");
  REQUIRE(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
  REQUIRE(std::string(cudaGetErrorString(static_cast<cudaError_t>(12345))) ==
          "unrecognized error code");
}

void last_error() {
  OK(cudaGetLastError());
  FAILS(cudaSetDevice(99), cudaErrorInvalidDevice);
  std::thread([] { OK(cudaPeekAtLastError()); }).join();  // each thread has its own
  FAILS(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  OK(cudaFree(nullptr));  // success does not take it away
  FAILS(cudaGetLastError(), cudaErrorInvalidDevice);
  OK(cudaGetLastError());
  cudaStream_t stream = new_stream();
  hold_stream(stream);
  OK(cudaMemsetAsync(device_ints(1), 0, 4, stream));
  FAILS(cudaStreamQuery(stream), cudaErrorNotReady);
  FAILS(cudaGetLastError(), cudaErrorNotReady);
  release_stream(stream);
}

// A kernel that failed: nothing works on that device any more.
void poisoned() {
  cudaStream_t stream = new_stream();
  int* p = device_ints(kN);
  fail_call("kernel", 1, cudaErrorIllegalAddress);
  OK(launch_fill(p, 1, kN, stream));
  OK(cudaStreamSynchronize(stream));
  OK(launch_fill(p, 1, kN, stream));
  FAILS(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
  FAILS(launch_fill(p, 1, kN, stream), cudaErrorIllegalAddress);
  FAILS(cudaFree(p), cudaErrorIllegalAddress);
  FAILS(cudaGetLastError(), cudaErrorIllegalAddress);
  FAILS(cudaGetLastError(), cudaErrorIllegalAddress);
  OK(cudaSetDevice(1));
  OK(cudaFree(device_ints(kN)));
}

void faults() {
  void* p = nullptr;
  fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation);
  OK(cudaMalloc(&p, 4));
  OK(cudaMalloc(&p, 4));
  FAILS(cudaMalloc(&p, 4), cudaErrorMemoryAllocation);
  OK(cudaMalloc(&p, 4));
  fail_call("cudaLaunchKernelExC", 0, cudaErrorLaunchOutOfResources);
  FAILS(launch_fill(static_cast<int*>(p), 0, 1, nullptr), cudaErrorLaunchOutOfResources);
  fail_call("cudaMalloc", 0, cudaErrorMemoryAllocation);
  clear_faults();
  OK(cudaMalloc(&p, 4));
}

// With PYCOLL_SIM_FAULTS=cudaEventCreateWithFlags:1=46,cudaStreamCreateWithFlags:0=kill
void faults_of_environment() {
  cudaEvent_t event;
  OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  FAILS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaErrorDevicesUnavailable);
  new_stream();
}

cudaError_t launch_shaped(dim3 grid, dim3 block, size_t shared = 0) {
  static int* p = device_ints(kN);
  return device::launch(&fill, device::LaunchShape{grid, block, shared}, nullptr, p, 1, kN);
}

void launch_shapes() {
  FAILS(launch_shaped(dim3(1), dim3(1025)), cudaErrorInvalidConfiguration);
  FAILS(launch_shaped(dim3(1), dim3(0)), cudaErrorInvalidConfiguration);
  FAILS(launch_shaped(dim3(0), dim3(32)), cudaErrorInvalidConfiguration);
  FAILS(launch_shaped(dim3(1), dim3(1, 1, 65)), cudaErrorInvalidConfiguration);
  FAILS(launch_shaped(dim3(1), dim3(32), (48 << 10) + 1), cudaErrorInvalidValue);
  OK(launch_shaped(dim3(1), dim3(32), 48 << 10));
  OK(launch_shaped(dim3(1), dim3(1024)));
  OK(cudaDeviceSynchronize());
}

void functions() {
  const auto* function = reinterpret_cast<const void*>(&fill);
  cudaFuncAttributes attributes;
  int blocks = 0;
  OK(cudaFuncGetAttributes(&attributes, function));
  REQUIRE(attributes.maxThreadsPerBlock == 1024);
  OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 512, 0));
  REQUIRE(blocks == 4);
  OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, 32, 100 << 10));
  REQUIRE(blocks == 2);
  FAILS(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10),
        cudaErrorInvalidValue);
  OK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
  OK(launch_shaped(dim3(1), dim3(32), 100 << 10));
  FAILS(launch_shaped(dim3(1), dim3(32), (100 << 10) + 1), cudaErrorInvalidValue);
}

// With CUDA_VISIBLE_DEVICES=2,0 PYCOLL_SIM_DEVICES=4 PYCOLL_SIM_RESIDENT=3
void devices() {
  int count = 0, value = 0, device = -1;
  OK(cudaGetDeviceCount(&count));
  REQUIRE(count == 2);
  FAILS(cudaSetDevice(2), cudaErrorInvalidDevice);
  char first[32], second[32], tiny[4];
  OK(cudaDeviceGetPCIBusId(first, sizeof(first), 0));
  OK(cudaDeviceGetPCIBusId(second, sizeof(second), 1));
  FAILS(cudaDeviceGetPCIBusId(tiny, sizeof(tiny), 1), cudaErrorInvalidValue);
  REQUIRE(std::string(first) == "0000:19:00.0" && std::string(second) == "0000:17:00.0");
  OK(cudaDeviceGetByPCIBusId(&device, second));
  REQUIRE(device == 1);
  OK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  REQUIRE(value == 3);
  OK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 1));
  REQUIRE(value == 9);
  cudaDeviceProp a, b;
  OK(cudaGetDeviceProperties(&a, 0));
  OK(cudaGetDeviceProperties(&b, 1));
  REQUIRE(std::memcmp(&a.uuid, &b.uuid, sizeof(a.uuid)) != 0);
  OK(cudaDriverGetVersion(&value));
  REQUIRE(value >= 13000);
}

void peers() {
  int possible = -1;
  OK(cudaDeviceCanAccessPeer(&possible, 0, 1));
  REQUIRE(possible == 1);
  OK(cudaDeviceCanAccessPeer(&possible, 0, 0));
  REQUIRE(possible == 0);
  set_peer_access(0, 2, false);
  OK(cudaDeviceCanAccessPeer(&possible, 0, 2));
  REQUIRE(possible == 0);
  FAILS(cudaDeviceEnablePeerAccess(2, 0), cudaErrorPeerAccessUnsupported);
  FAILS(cudaDeviceEnablePeerAccess(0, 0), cudaErrorInvalidDevice);
  int* on_zero = device_ints(kN);
  OK(cudaSetDevice(1));
  int* on_one = device_ints(kN);
  OK(cudaSetDevice(0));
  OK(launch_fill(on_zero, 6, kN, nullptr));
  // Legal without access, through the host; counted.
  OK(cudaMemcpy(on_one, on_zero, kN * sizeof(int), cudaMemcpyDeviceToDevice));
  REQUIRE(all_are(on_one, kN, 6));
  REQUIRE(counters().staged_peer_copies == 1);
  OK(cudaDeviceEnablePeerAccess(1, 0));
  FAILS(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
  OK(cudaMemcpyPeer(on_zero, 0, on_one, 1, kN * sizeof(int)));
  REQUIRE(counters().staged_peer_copies == 1);
  FAILS(cudaMemcpyPeer(on_zero, 1, on_one, 0, 4), cudaErrorInvalidValue);
  OK(cudaDeviceDisablePeerAccess(1));
  FAILS(cudaDeviceDisablePeerAccess(1), cudaErrorPeerAccessNotEnabled);
}

void no_device() {  // With PYCOLL_SIM_DEVICES=0
  int count = -1;
  void* p = nullptr;
  FAILS(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  FAILS(cudaMalloc(&p, 4), cudaErrorNoDevice);
  FAILS(cudaGetLastError(), cudaErrorNoDevice);
}

__global__ void wait_for(unsigned* flag) {
  while (device::load_acquire<device::Scope::system>(flag) == 0) device::spin_pause();
}

// With PYCOLL_SIM_TIMEOUT_S=1: it ends the process.
void nobody_answers() {
  auto* flag = reinterpret_cast<unsigned*>(pinned_ints(1));
  OK(device::launch(&wait_for, device::LaunchShape{dim3(1), dim3(1)}, nullptr, flag));
  OK(cudaDeviceSynchronize());
}

void forked_child() {
  OK(cudaFree(device_ints(kN)));
  OK(cudaDeviceSynchronize());
  const pid_t child = ::fork();
  if (child == 0) {
    void* p = nullptr;
    ::_exit(cudaMalloc(&p, 4) == cudaErrorInitializationError ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace

std::vector<RuntimeScenario> error_scenarios() {
  return {
      {"names", "names and texts of errors", names},
      {"last_error", "cudaGetLastError and cudaPeekAtLastError", last_error},
      {"poisoned", "a kernel fails: the device is lost to the process", poisoned},
      {"faults", "errors on purpose", faults},
      {"faults_of_environment", "PYCOLL_SIM_FAULTS", faults_of_environment},
      {"launch_shapes", "shapes that no device runs", launch_shapes},
      {"functions", "occupancy and dynamic shared memory", functions},
      {"devices", "which devices a process sees", devices},
      {"peers", "access between devices", peers},
      {"no_device", "a machine without devices", no_device},
      {"nobody_answers", "a kernel that waits for ever", nobody_answers},
      {"forked_child", "CUDA does not work after fork", forked_child},
  };
}

}  // namespace pycoll::sim::tests
