// The torch device "simgpu" (PrivateUse1) on the simulated CUDA runtime: what a CUDA device is to
// torch, as far as torch.distributed, DDP and their tests need it.
//
// Streams, events, copies and frees are the runtime's, so they are as asynchronous and as strictly
// ordered as CUDA's; arithmetic is done by torch's CPU kernels on copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

namespace pycoll::simgpu {

constexpr auto kSimGpu = c10::DeviceType::PrivateUse1;

// Throws c10::Error with CUDA's name for the error.
void check(cudaError_t error, const char* call);
#define SIMGPU_CHECK(call) ::pycoll::simgpu::check((call), #call)

c10::DeviceIndex current_device();
// Makes a device the thread's current one while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

// Id 0 is the legacy stream of the device, which the runtime finds by the current device; every
// other id is the handle.
inline cudaStream_t handle_of(const c10::Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.id());
}
c10::Stream current_stream(c10::DeviceIndex device);
// That torch has asked for so far, on all devices.
size_t high_priority_streams();

// Device memory. Each tensor's is a cudaMalloc of its own, so that every mistake about lifetimes
// shows: what is freed is overwritten and unmapped as soon as the stream it was allocated on, and
// those that it was recorded on, have come to that point, and no later.
c10::Allocator& device_allocator();
void record_use(const c10::DataPtr& data, const c10::Stream& stream);
// Page-locked host memory.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

}  // namespace pycoll::simgpu
