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
CUresult driver(const char* function, Body&& body, Rule rule = Rule::usual) {
  const cudaError_t before = this_thread().last_error;
  const cudaError_t error = api(function, rule, body);
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

// In the order in which they come; the first that is refused ends it.
CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* parameters,
                            unsigned flags) {
  constexpr unsigned kMost = 256;
  if (count > kMost || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned i = 0; i < count; ++i) {
    const auto& wait = parameters[i].waitValue;
    const auto& write = parameters[i].writeValue;
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    switch (parameters[i].operation) {
      case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        result = wait_value<cuuint32_t>(__func__, stream, wait.address, wait.value, wait.flags);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        result = write_value<cuuint32_t>(__func__, stream, write.address, write.value, write.flags);
        break;
      case CU_STREAM_MEM_OP_WAIT_VALUE_64:
        result = wait_value<cuuint64_t>(__func__, stream, wait.address, wait.value64, wait.flags);
        break;
      case CU_STREAM_MEM_OP_WRITE_VALUE_64:
        result =
            write_value<cuuint64_t>(__func__, stream, write.address, write.value64, write.flags);
        break;
      default:
        break;
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// A device is its ordinal.
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return driver(
      __func__,
      [&](const Call& call) {
        if (!call.runtime.is_device(device)) return cudaErrorInvalidDevice;
        *flags = 0;
        *active = call.runtime.devices[device].has_context ? 1 : 0;
        return cudaSuccess;
      },
      Rule::question);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  static const EntryPoint known[] = {
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&cuMemGetAddressRange)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(&cuPointerGetAttribute)},
      {"cuStreamBatchMemOp", reinterpret_cast<void*>(&cuStreamBatchMemOp)},
      {"cuStreamWaitValue32", reinterpret_cast<void*>(&cuStreamWaitValue32)},
      {"cuStreamWaitValue64", reinterpret_cast<void*>(&cuStreamWaitValue64)},
      {"cuStreamWriteValue32", reinterpret_cast<void*>(&cuStreamWriteValue32)},
      {"cuStreamWriteValue64", reinterpret_cast<void*>(&cuStreamWriteValue64)},
  };
  return api(__func__, Rule::question, [&](const Call&) {
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
