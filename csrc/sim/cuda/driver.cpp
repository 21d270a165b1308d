// The few functions of the driver API that a user of the runtime needs: where an allocation begins,
// which allocation it is, and values in memory as events. Programs that do not link to the driver
// get them by name.
#include <cuda.h>

#include <cstring>
#include <string_view>

#include "sim/cuda/runtime.h"
#include "sim/kernel_side.h"

namespace pycoll::sim::cuda {
namespace {

// The driver's calls have no last error; their codes are numbered as the runtime's.
template <class Body>
CUresult driver(const char* function, Body&& body) {
  const cudaError_t before = this_thread().last_error;
  const cudaError_t error = api(function, Rule::usual, body);
  this_thread().last_error = before;
  return static_cast<CUresult>(error);
}

void* pointer_of(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

template <class Value>
cudaError_t give(void* to, Value value) {
  std::memcpy(to, &value, sizeof(value));
  return cudaSuccess;
}

cudaError_t attribute(const Call& call, void* to, CUpointer_attribute which, CUdeviceptr address) {
  const Allocation* found = call.runtime.memory.find(pointer_of(address));
  if (to == nullptr || found == nullptr) return cudaErrorInvalidValue;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return give<unsigned>(to, found->on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return give<int>(to, found->device);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      return give<unsigned long long>(to, found->id);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      return give<void*>(to, found->base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      return give<size_t>(to, found->bytes);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      return give<int>(to, found->kind == MemoryKind::device ? 1 : 0);
    default:
      return cudaErrorNotSupported;
  }
}

template <class Value>
bool satisfies(Value found, Value wanted, unsigned flags) {
  switch (flags) {
    case CU_STREAM_WAIT_VALUE_GEQ:  // as a counter that wraps
      return static_cast<std::make_signed_t<Value>>(found - wanted) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return found == wanted;
    case CU_STREAM_WAIT_VALUE_AND:
      return (found & wanted) != 0;
    default:  // CU_STREAM_WAIT_VALUE_NOR
      return static_cast<Value>(~(found | wanted)) != 0;
  }
}

// Null: not memory that a device can reach, or not aligned.
template <class Value>
Value* word_at(const Call& call, CUdeviceptr address) {
  auto* word = static_cast<Value*>(pointer_of(address));
  const Allocation* found = call.runtime.memory.find(word);
  if (found == nullptr || address % sizeof(Value) != 0) return nullptr;
  const size_t offset = reinterpret_cast<std::byte*>(word) - found->base;
  return found->bytes - offset >= sizeof(Value) ? word : nullptr;
}

template <class Value>
CUresult wait_value(const char* function, CUstream handle, CUdeviceptr address, Value value,
                    unsigned flags) {
  return driver(function, [&](const Call& call) {
    const auto stream = call.runtime.stream(handle, call.thread);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    Value* word = word_at<Value>(call, address);
    if (word == nullptr || flags > CU_STREAM_WAIT_VALUE_NOR) return cudaErrorInvalidValue;
    Plan plan;
    plan.kind = Kind::poll;
    plan.poll = [=] {
      const AtomicAccess access(
          {word, sizeof(Value), device::Scope::system, Access::load_acquire, Place::here()});
      return satisfies(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, flags);
    };
    return call.runtime.submit(*stream, std::move(plan));
  });
}

template <class Value>
CUresult write_value(const char* function, CUstream handle, CUdeviceptr address, Value value,
                     unsigned flags) {
  return driver(function, [&](const Call& call) {
    const auto stream = call.runtime.stream(handle, call.thread);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    Value* word = word_at<Value>(call, address);
    if (word == nullptr || flags != CU_STREAM_WRITE_VALUE_DEFAULT) return cudaErrorInvalidValue;
    Plan plan;
    plan.kind = Kind::memory;
    plan.work = [=] {
      const AtomicAccess access(
          {word, sizeof(Value), device::Scope::system, Access::store_release, Place::here()});
      __atomic_store_n(word, value, __ATOMIC_RELEASE);
    };
    return call.runtime.submit(*stream, std::move(plan));
  });
}

struct EntryPoint {
  std::string_view name;
  void* function;
};

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  return driver("cuMemGetAddressRange", [&](const Call& call) {
    const Allocation* found = call.runtime.memory.find(pointer_of(address));
    if (found == nullptr) return cudaErrorInvalidValue;
    if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(found->base);
    if (bytes != nullptr) *bytes = found->bytes;
    return cudaSuccess;
  });
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
  return driver(__func__, [&](const Call& call) { return attribute(call, value, which, address); });
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                             unsigned flags) {
  return wait_value("cuStreamWaitValue32", stream, address, value, flags);
}

CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                             unsigned flags) {
  return wait_value("cuStreamWaitValue64", stream, address, value, flags);
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value,
                              unsigned flags) {
  return write_value("cuStreamWriteValue32", stream, address, value, flags);
}

CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value,
                              unsigned flags) {
  return write_value("cuStreamWriteValue64", stream, address, value, flags);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  static const EntryPoint known[] = {
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&cuMemGetAddressRange)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(&cuPointerGetAttribute)},
      {"cuStreamWaitValue32", reinterpret_cast<void*>(&cuStreamWaitValue32)},
      {"cuStreamWaitValue64", reinterpret_cast<void*>(&cuStreamWaitValue64)},
      {"cuStreamWriteValue32", reinterpret_cast<void*>(&cuStreamWriteValue32)},
      {"cuStreamWriteValue64", reinterpret_cast<void*>(&cuStreamWriteValue64)},
  };
  return api(__func__, Rule::usual, [&](const Call&) {
    if (symbol == nullptr || function == nullptr) return cudaErrorInvalidValue;
    *function = nullptr;
    for (const EntryPoint& entry : known) {
      if (entry.name == symbol) *function = entry.function;
    }
    if (status != nullptr) {
      *status =
          *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    }
    return cudaSuccess;
  });
}
