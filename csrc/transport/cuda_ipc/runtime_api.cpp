#include "transport/cuda_ipc/runtime_api.h"

#include "core/error.h"

namespace pycoll::cuda {

std::string describe(cudaError_t error, const std::string& what) {
  return concat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ", ",
                static_cast<int>(error), ")");
}

void require(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  fail(ErrorKind::system, describe(error, what));
}

DeviceGuard::DeviceGuard(int device) {
  require(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) require(cudaSetDevice(device), concat("cudaSetDevice(", device, ")"));
}

DeviceGuard::~DeviceGuard() {
  cudaSetDevice(before_);
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

Stream::Stream() {
  cudaStream_t stream = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  stream_.reset(stream);
}

}  // namespace pycoll::cuda
