// CUDA's runtime API as objects that own what they make, and throw.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

namespace pycoll::cuda {

// "cudaMalloc: out of memory (cudaErrorMemoryAllocation, 2)"
std::string describe(cudaError_t error, const std::string& what);

// Throws Error(system) with describe(). The runtime's own memory of the error is cleared.
void require(cudaError_t error, const std::string& what);

// Makes `device` current until it goes. A thread whose own device has no context in this process
// (it never used a GPU, and has device 0 for that reason alone) keeps `device`: to go back would
// make a context, hundreds of megabytes on a GPU that is another rank's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  const int device_;
  int before_ = 0;
};

// This thread may allocate and synchronise streams of its own while another stream is captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What one of CUDA's functions ends. Errors at the end of a process have nobody to go to.
template <auto kFree>
struct Freed {
  template <class T>
  void operator()(T* p) const {
    kFree(p);
  }
};

// Of the current device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes);
  std::byte* data() const { return memory_.get(); }
  size_t size() const { return bytes_; }

 private:
  std::unique_ptr<std::byte, Freed<cudaFree>> memory_;
  size_t bytes_ = 0;
};

// Host memory that kernels of all devices reach at the same address.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(size_t bytes);
  std::byte* data() const { return memory_.get(); }
  size_t size() const { return bytes_; }

 private:
  std::unique_ptr<std::byte, Freed<cudaFreeHost>> memory_;
  size_t bytes_ = 0;
};

// Without time.
class Event {
 public:
  Event();
  cudaEvent_t get() const { return event_.get(); }
  // cudaErrorNotReady is an answer here: nobody finds it in cudaGetLastError() later.
  cudaError_t query() const;

 private:
  std::unique_ptr<CUevent_st, Freed<cudaEventDestroy>> event_;
};

// Not ordered with the legacy stream.
class Stream {
 public:
  Stream();
  // Of the highest priority. CUDA may give streams of one priority one queue of the hardware, where
  // one that waits holds up another: what lets go of streams that wait must not be among them.
  static Stream ahead_of_others();
  cudaStream_t get() const { return stream_.get(); }

 private:
  explicit Stream(int priority);
  std::unique_ptr<CUstream_st, Freed<cudaStreamDestroy>> stream_;
};

}  // namespace pycoll::cuda
