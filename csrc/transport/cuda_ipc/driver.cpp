#include "transport/cuda_ipc/driver.h"

#include <algorithm>

#include "core/error.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {
namespace {

// As CUDA 12.0 had them.
constexpr unsigned kDriverVersion = 12000;
// CUDA's limit is 256.
constexpr size_t kMostInBatch = 128;

template <class Function>
void find(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kDriverVersion, cudaEnableDefault, &status);
  if (error != cudaSuccess) cudaGetLastError();
  function = error == cudaSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

void require_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  fail(ErrorKind::system, what, ": error ", static_cast<int>(result), " of the CUDA driver");
}

CUdeviceptr address_of(const void* p) {
  return reinterpret_cast<CUdeviceptr>(p);
}

CUstreamBatchMemOpParams parameters_of(const WordOperation& operation) {
  CUstreamBatchMemOpParams result{};
  if (operation.waits) {
    result.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    result.waitValue.address = address_of(operation.word);
    result.waitValue.value = operation.value;
    result.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  } else {
    result.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    result.writeValue.address = address_of(operation.word);
    result.writeValue.value = operation.value;
    result.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }
  return result;
}

}  // namespace

Driver::Driver() {
  find("cuMemGetAddressRange", range_);
  find("cuStreamWaitValue32", wait_);
  find("cuStreamWriteValue32", write_);
  find("cuPointerGetAttribute", attribute_);
  find("cuStreamWriteValue64", write64_);
  find("cuStreamBatchMemOp", batch_);
  const bool complete = range_ != nullptr && wait_ != nullptr && write_ != nullptr &&
                        attribute_ != nullptr && write64_ != nullptr;
  if (complete) return;
  fail(ErrorKind::system, "the CUDA driver lacks cuStreamWaitValue32, cuStreamWriteValue64, ",
       "cuMemGetAddressRange or cuPointerGetAttribute: one for CUDA 12 or newer is needed");
}

std::byte* Driver::base_of(const void* p) const {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  require_driver(range_(&base, &bytes, address_of(p)), "cuMemGetAddressRange");
  return reinterpret_cast<std::byte*>(base);
}

std::optional<Driver::Allocation> Driver::find_allocation(const void* p) const {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (range_(&base, &bytes, address_of(p)) != CUDA_SUCCESS) return std::nullopt;
  Allocation found{reinterpret_cast<std::byte*>(base), bytes};
  unsigned long long identity = 0;
  if (attribute_(&identity, CU_POINTER_ATTRIBUTE_BUFFER_ID, base) != CUDA_SUCCESS) {
    return std::nullopt;
  }
  found.identity = identity;
  int capable = 0;
  constexpr auto kCapable = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
  found.can_be_shared = attribute_(&capable, kCapable, base) == CUDA_SUCCESS && capable != 0;
  return found;
}

void Driver::write(uint64_t* word, uint64_t value, cudaStream_t stream) const {
  require_driver(write64_(stream, address_of(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                 "cuStreamWriteValue64");
}

void Driver::enqueue(const std::vector<WordOperation>& operations, cudaStream_t stream) const {
  if (batch_ == nullptr) {
    for (const WordOperation& one : operations) {
      const CUdeviceptr word = address_of(one.word);
      const CUresult result = one.waits
                                  ? wait_(stream, word, one.value, CU_STREAM_WAIT_VALUE_EQ)
                                  : write_(stream, word, one.value, CU_STREAM_WRITE_VALUE_DEFAULT);
      require_driver(result, one.waits ? "cuStreamWaitValue32" : "cuStreamWriteValue32");
    }
    return;
  }
  for (size_t first = 0; first < operations.size(); first += kMostInBatch) {
    const size_t count = std::min(kMostInBatch, operations.size() - first);
    std::vector<CUstreamBatchMemOpParams> parameters;
    for (size_t i = 0; i < count; ++i) parameters.push_back(parameters_of(operations[first + i]));
    require_driver(batch_(stream, static_cast<unsigned>(count), parameters.data(), 0),
                   "cuStreamBatchMemOp");
  }
}

}  // namespace pycoll::cuda
