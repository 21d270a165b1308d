// cudaMalloc and its relatives.
#include <algorithm>
#include <initializer_list>

#include "sim/cuda/runtime.h"

namespace pycoll::sim::cuda {
namespace {

constexpr unsigned kHostAllocFlags =
    cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
constexpr unsigned kRegisterFlags = cudaHostRegisterPortable | cudaHostRegisterMapped |
                                    cudaHostRegisterIoMemory | cudaHostRegisterReadOnly;

cudaError_t allocate(const Call& call, void** pointer, size_t bytes, MemoryKind kind) {
  if (pointer == nullptr) return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  Runtime& runtime = call.runtime;
  const int device = call.thread.device;
  const size_t used = runtime.memory.device_bytes(device);
  if (bytes > runtime.settings.memory_bytes - std::min(used, runtime.settings.memory_bytes)) {
    return cudaErrorMemoryAllocation;
  }
  const Allocation* made = runtime.memory.allocate_device(bytes, device, kind);
  if (made == nullptr) return cudaErrorMemoryAllocation;
  *pointer = made->base;
  return cudaSuccess;
}

cudaError_t allocate_pinned(const Call& call, void** pointer, size_t bytes, unsigned flags) {
  if (pointer == nullptr || (flags & ~kHostAllocFlags) != 0) return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const Allocation* made = call.runtime.memory.allocate_pinned(bytes, flags);
  if (made == nullptr) return cudaErrorMemoryAllocation;
  *pointer = made->base;
  return cudaSuccess;
}

// Freeing waits for all that might still use the memory: of its device, or of all of them. On a
// device that has failed nothing uses it any more.
cudaError_t wait_for_users(const Call& call, int device) {
  const auto tails = call.runtime.tails_of_device(device);
  const cudaError_t error = call.runtime.wait_for(call.lock, tails, device);
  return error == cudaErrorCudartUnloading ? error : cudaSuccess;
}

cudaError_t wait_for_users(const Call& call, bool on_device, int device) {
  if (on_device) return wait_for_users(call, device);
  for (int each = 0; each < static_cast<int>(call.runtime.devices.size()); ++each) {
    if (const cudaError_t error = wait_for_users(call, each)) return error;
  }
  return cudaSuccess;
}

cudaError_t free_memory(const Call& call, void* pointer, std::initializer_list<MemoryKind> kinds,
                        cudaError_t wrong) {
  if (pointer == nullptr) return cudaSuccess;
  const auto find = [&] {
    Allocation* found = call.runtime.memory.find_base(pointer);
    const bool right = found != nullptr && !found->freed &&
                       std::find(kinds.begin(), kinds.end(), found->kind) != kinds.end();
    return right ? found : nullptr;
  };
  const Allocation* found = find();
  if (found == nullptr) return wrong;
  if (const cudaError_t error = wait_for_users(call, found->on_device(), found->device)) {
    return error;
  }
  Allocation* still = find();  // another thread may have freed it meanwhile
  if (still == nullptr) return wrong;
  call.runtime.memory.release(still);
  return call.device().poison;
}

cudaError_t allocate_on_stream(const Call& call, void** pointer, size_t bytes, cudaStream_t on) {
  const auto stream = call.runtime.stream(on, call.thread);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr) {  // CUDA makes an allocation node; we do not
    call.runtime.invalidate(*stream->capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  return allocate(call, pointer, bytes, MemoryKind::pool);
}

cudaError_t free_on_stream(const Call& call, void* pointer, cudaStream_t on) {
  Runtime& runtime = call.runtime;
  const auto stream = runtime.stream(on, call.thread);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr) {
    runtime.invalidate(*stream->capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  if (pointer == nullptr) return cudaSuccess;
  Allocation* found = runtime.memory.find_base(pointer);
  if (found == nullptr || found->kind > MemoryKind::pool || found->freed) {
    return cudaErrorInvalidValue;
  }
  found->freed = true;
  Plan plan;
  plan.kind = Kind::memory;
  plan.work = [&runtime, found] {
    const Quiet quiet;
    const Lock lock(runtime.mutex);
    runtime.memory.release(found);
  };
  return runtime.submit(*stream, std::move(plan));
}

cudaError_t register_host(const Call& call, void* pointer, size_t bytes, unsigned flags) {
  if (pointer == nullptr || bytes == 0 || (flags & ~kRegisterFlags) != 0) {
    return cudaErrorInvalidValue;
  }
  if (call.runtime.memory.overlaps(pointer, bytes)) return cudaErrorHostMemoryAlreadyRegistered;
  call.runtime.memory.add_registered(pointer, bytes, flags);
  return cudaSuccess;
}

// Null: not host memory that CUDA knows.
Allocation* find_host(const Call& call, const void* pointer) {
  Allocation* found = call.runtime.memory.find(pointer);
  return found == nullptr || found->on_device() ? nullptr : found;
}

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return api(__func__, Rule::no_capture,
             [&](const Call& call) { return allocate(call, pointer, bytes, MemoryKind::device); });
}

// Waits for the whole device, as CUDA does.
cudaError_t cudaFree(void* pointer) {
  return api(__func__, Rule::no_capture, [&](const Call& call) {
    return free_memory(call, pointer, {MemoryKind::device, MemoryKind::pool},
                       cudaErrorInvalidValue);
  });
}

// From a pool: such memory cannot be exported to other processes with cudaIpcGetMemHandle.
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return allocate_on_stream(call, pointer, bytes, stream); });
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return free_on_stream(call, pointer, stream); });
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return api(__func__, Rule::no_capture,
             [&](const Call& call) { return allocate_pinned(call, pointer, bytes, flags); });
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return api(__func__, Rule::no_capture, [&](const Call& call) {
    return allocate_pinned(call, pointer, bytes, cudaHostAllocDefault);
  });
}

cudaError_t cudaFreeHost(void* pointer) {
  return api(__func__, Rule::no_capture, [&](const Call& call) {
    return free_memory(call, pointer, {MemoryKind::pinned}, cudaErrorInvalidValue);
  });
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  return api(__func__, Rule::no_capture,
             [&](const Call& call) { return register_host(call, pointer, bytes, flags); });
}

cudaError_t cudaHostUnregister(void* pointer) {
  return api(__func__, Rule::no_capture, [&](const Call& call) {
    return pointer == nullptr ? cudaErrorInvalidValue
                              : free_memory(call, pointer, {MemoryKind::registered},
                                            cudaErrorHostMemoryNotRegistered);
  });
}

// All host memory is mapped at its own address, as with unified addressing.
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    if (device == nullptr || flags != 0 || find_host(call, host) == nullptr) {
      return cudaErrorInvalidValue;
    }
    *device = host;
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetFlags(unsigned* flags, void* host) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const Allocation* found = find_host(call, host);
    if (flags == nullptr || found == nullptr) return cudaErrorInvalidValue;
    *flags = found->flags | cudaHostAllocMapped;
    return cudaSuccess;
  });
}

// Counts what this process has allocated, not what others have on the same device.
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const size_t all = call.runtime.settings.memory_bytes;
    const size_t used = call.runtime.memory.device_bytes(call.thread.device);
    if (total != nullptr) *total = all;
    if (free != nullptr) *free = all - std::min(used, all);
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    const Allocation* found = call.runtime.memory.find(pointer);
    if (found == nullptr) return cudaSuccess;
    auto* address = const_cast<void*>(pointer);
    attributes->type = found->on_device() ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = found->device;
    attributes->devicePointer = address;
    attributes->hostPointer = found->on_device() ? nullptr : address;
    return cudaSuccess;
  });
}
