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

// The numbers of errors are those of the runtime.
void require_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  fail(ErrorKind::system, describe(static_cast<cudaError_t>(result), what));
}

CUdeviceptr address_of(const void* p) {
  return reinterpret_cast<CUdeviceptr>(p);
}

CUstreamBatchMemOpParams parameters_of(const WordOperation& operation) {
  CUstreamBatchMemOpParams result{};
  const auto value = static_cast<cuuint32_t>(operation.value);
  switch (operation.kind) {
    case WordOperation::Kind::wait32:
      result.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
      result.waitValue.address = address_of(operation.word);
      result.waitValue.value = value;
      result.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
      break;
    case WordOperation::Kind::write32:
      result.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
      result.writeValue.address = address_of(operation.word);
      result.writeValue.value = value;
      result.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      break;
    case WordOperation::Kind::write64:
      result.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
      result.writeValue.address = address_of(operation.word);
      result.writeValue.value64 = operation.value;
      result.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      break;
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

void Driver::enqueue_one(const WordOperation& operation, cudaStream_t stream) const {
  const CUdeviceptr word = address_of(operation.word);
  const auto value = static_cast<cuuint32_t>(operation.value);
  switch (operation.kind) {
    case WordOperation::Kind::wait32:
      require_driver(wait_(stream, word, value, CU_STREAM_WAIT_VALUE_EQ), "cuStreamWaitValue32");
      break;
    case WordOperation::Kind::write32:
      require_driver(write_(stream, word, value, CU_STREAM_WRITE_VALUE_DEFAULT),
                     "cuStreamWriteValue32");
      break;
    case WordOperation::Kind::write64:
      require_driver(write64_(stream, word, operation.value, CU_STREAM_WRITE_VALUE_DEFAULT),
                     "cuStreamWriteValue64");
      break;
  }
}

void Driver::enqueue(const std::vector<WordOperation>& operations, cudaStream_t stream) const {
  if (batch_ == nullptr) {
    for (const WordOperation& one : operations) enqueue_one(one, stream);
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
