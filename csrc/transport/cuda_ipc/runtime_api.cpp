#include "transport/cuda_ipc/runtime_api.h"

#include <cuda.h>

#include "core/error.h"

namespace pycoll::cuda {
namespace {

// Whether this process has used the device. CUDA has no such question in its runtime API. Where it
// cannot be answered (the current device has failed): no.
bool has_context(int device) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  constexpr unsigned kDriverVersion = 12000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuDevicePrimaryCtxGetState", &found, kDriverVersion, cudaEnableDefault, &status);
  if (error != cudaSuccess || found == nullptr) {
    cudaGetLastError();
    return false;
  }
  const auto ask = reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(found);
  unsigned flags = 0;
  int active = 0;
  return ask(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

}  // namespace

std::string describe(cudaError_t error, const std::string& what) {
  return concat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ", ",
                static_cast<int>(error), ")");
}

void require(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail(ErrorKind::system, describe(error, what));
}

DeviceGuard::DeviceGuard(int device) : device_(device) {
  require(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) require(cudaSetDevice(device), concat("cudaSetDevice(", device, ")"));
}

DeviceGuard::~DeviceGuard() {
  if (before_ != device_ && has_context(before_)) cudaSetDevice(before_);
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, bytes), concat("cudaMalloc of ", bytes, " bytes"));
  memory_.reset(static_cast<std::byte*>(memory));
}

PinnedMemory::PinnedMemory(size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  constexpr unsigned kFlags = cudaHostAllocPortable | cudaHostAllocMapped;
  require(cudaHostAlloc(&memory, bytes, kFlags), concat("cudaHostAlloc of ", bytes, " bytes"));
  memory_.reset(static_cast<std::byte*>(memory));
}

Event::Event() {
  cudaEvent_t event = nullptr;
  require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event_.reset(event);
}

cudaError_t Event::query() const {
  const cudaError_t state = cudaEventQuery(event_.get());
  if (state != cudaSuccess) cudaGetLastError();
  return state;
}

Stream::Stream() : Stream(0) {}

Stream::Stream(int priority) {
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
          "cudaStreamCreateWithPriority");
  stream_.reset(stream);
}

Stream Stream::ahead_of_others() {
  int least = 0, greatest = 0;
  require(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  return Stream(greatest);
}

}  // namespace pycoll::cuda
