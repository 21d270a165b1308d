// Memory of other processes.
//
// A handle means a whole allocation, whatever pointer into it was given: the importer gets the
// base, and the exporter must tell the offset.
#include <unistd.h>

#include <cstring>

#include "sim/cuda/runtime.h"

namespace pycoll::sim::cuda {
namespace {

// The layout of a cudaIpcMemHandle_t.
struct MemoryHandle {
  uint64_t magic;
  FileName name;
  uint64_t bytes;
  int32_t machine_device;
};
constexpr uint64_t kMagic = 0x70'79'63'6f'6c'6c'6d'65;
static_assert(sizeof(MemoryHandle) <= sizeof(cudaIpcMemHandle_t));

// The ordinal here of a device of the machine; of a device that is not visible, the current one.
int ordinal_of(const Call& call, int machine_device) {
  for (size_t device = 0; device < call.runtime.devices.size(); ++device) {
    if (call.runtime.devices[device].machine_device == machine_device) {
      return static_cast<int>(device);
    }
  }
  return call.thread.device;
}

cudaError_t export_memory(const Call& call, cudaIpcMemHandle_t* handle, void* pointer) {
  const Allocation* found = call.runtime.memory.find(pointer);
  if (handle == nullptr || found == nullptr || found->kind != MemoryKind::device) {
    return cudaErrorInvalidValue;
  }
  const MemoryHandle inside{kMagic, found->file.name, found->bytes,
                            call.runtime.devices[found->device].machine_device};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &inside, sizeof(inside));
  return cudaSuccess;
}

cudaError_t import_memory(const Call& call, void** pointer, const cudaIpcMemHandle_t& handle,
                          unsigned flags) {
  MemoryHandle inside;
  std::memcpy(static_cast<void*>(&inside), &handle, sizeof(inside));
  if (pointer == nullptr || flags != cudaIpcMemLazyEnablePeerAccess || inside.magic != kMagic) {
    return cudaErrorInvalidValue;
  }
  if (inside.name.process == ::getpid()) return cudaErrorDeviceUninitialized;
  const int device = ordinal_of(call, inside.machine_device);
  if (call.device().impossible_peers.contains(device)) return cudaErrorPeerAccessUnsupported;
  Memory& memory = call.runtime.memory;
  Allocation* found = memory.find_import(inside.name);
  if (found != nullptr) {
    ++found->opened;
  } else {
    found = memory.import(inside.name, inside.bytes, device);
    if (found == nullptr) return cudaErrorMapBufferObjectFailed;
  }
  *pointer = found->base;
  return cudaSuccess;
}

// Does not wait for whoever still uses the memory: that is then an access to nothing.
cudaError_t close_memory(const Call& call, void* pointer) {
  Allocation* found = call.runtime.memory.find_base(pointer);
  if (found == nullptr || found->kind != MemoryKind::imported) return cudaErrorInvalidValue;
  if (--found->opened == 0) call.runtime.memory.release(found);
  return cudaSuccess;
}

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return export_memory(call, handle, pointer); });
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  return api(__func__, Rule::no_capture,
             [&](const Call& call) { return import_memory(call, pointer, handle, flags); });
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  return api(__func__, Rule::no_capture,
             [&](const Call& call) { return close_memory(call, pointer); });
}
