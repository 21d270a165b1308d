// Functions of the driver API, found as a program that does not link to the driver finds them.
#include <cuda.h>

#include "runtime.h"

namespace pycoll::sim::tests {
namespace {

constexpr int kN = 64;

template <class Function>
Function find(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  OK(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status));
  REQUIRE(status == cudaDriverEntryPointSuccess && found != nullptr);
  return reinterpret_cast<Function>(found);
}

CUdeviceptr address_of(const void* p) {
  return reinterpret_cast<CUdeviceptr>(p);
}

void entry_points() {
  void* found = &found;
  cudaDriverEntryPointQueryResult status;
  OK(cudaGetDriverEntryPointByVersion("cuNothing", &found, 12000, cudaEnableDefault, &status));
  REQUIRE(status == cudaDriverEntryPointSymbolNotFound && found == nullptr);
}

void address_range() {
  const auto range = find<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange");
  const int* p = device_ints(kN);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  REQUIRE(range(&base, &bytes, address_of(p + 9)) == CUDA_SUCCESS);
  REQUIRE(base == address_of(p) && bytes == kN * sizeof(int));
  REQUIRE(range(&base, &bytes, address_of(p + kN)) == CUDA_ERROR_INVALID_VALUE);
  OK(cudaGetLastError());  // the driver's errors are not the runtime's
}

// Memory that is freed and given out again at the same address is another buffer.
void buffer_identity() {
  const auto get = find<decltype(&cuPointerGetAttribute)>("cuPointerGetAttribute");
  const auto id_of = [&](const void* p) {
    unsigned long long id = 0;
    REQUIRE(get(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address_of(p)) == CUDA_SUCCESS);
    return id;
  };
  int* p = device_ints(kN);
  const unsigned long long first = id_of(p);
  REQUIRE(id_of(p + 5) == first);
  OK(cudaFree(p));
  int* again = device_ints(kN);
  REQUIRE(id_of(again) != first);
  void* pool = nullptr;
  OK(cudaMallocAsync(&pool, 4, nullptr));
  int capable = -1;
  constexpr auto kCapable = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
  REQUIRE(get(&capable, kCapable, address_of(again)) == CUDA_SUCCESS && capable == 1);
  REQUIRE(get(&capable, kCapable, address_of(pool)) == CUDA_SUCCESS && capable == 0);
}

struct ValueFunctions {
  decltype(&cuStreamWaitValue32) wait = find<decltype(wait)>("cuStreamWaitValue32");
  decltype(&cuStreamWriteValue32) write = find<decltype(write)>("cuStreamWriteValue32");
};

// One stream writes a number, another waits for it: in memory, without an event.
void values() {
  const ValueFunctions functions;
  cudaStream_t writer = new_stream(), reader = new_stream();
  int* flag = device_ints(1);
  int* p = device_ints(kN);
  int* q = device_ints(kN);
  OK(cudaMemset(flag, 0, sizeof(int)));
  OK(cudaDeviceSynchronize());
  for (unsigned round = 1; round <= 5; ++round) {
    const int value = static_cast<int>(round);
    REQUIRE(functions.wait(reader, address_of(flag), round, CU_STREAM_WAIT_VALUE_GEQ) ==
            CUDA_SUCCESS);
    OK(launch_copy(q, p, kN, reader));
    REQUIRE(keeps_waiting(reader));
    OK(launch_fill(p, value, kN, writer));
    REQUIRE(functions.write(writer, address_of(flag), round, 0) == CUDA_SUCCESS);
    REQUIRE(all_are(q, kN, value));
  }
  REQUIRE(functions.wait(reader, address_of(flag) + 2, 1, 0) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(functions.write(reader, address_of(&writer), 1, 0) == CUDA_ERROR_INVALID_VALUE);
}

// Many in one call, of both widths, in their order.
void batches() {
  const auto enqueue = find<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  cudaStream_t stream = new_stream();
  auto* words = reinterpret_cast<unsigned*>(device_ints(4));
  OK(cudaMemset(words, 0, 4 * sizeof(*words)));
  OK(cudaDeviceSynchronize());
  CUstreamBatchMemOpParams all[3] = {};
  all[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  all[0].writeValue.address = address_of(words);
  all[0].writeValue.value64 = uint64_t{7} << 32 | 5;
  all[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  all[1].waitValue.address = address_of(words + 1);
  all[1].waitValue.value = 7;
  all[1].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  all[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  all[2].writeValue.address = address_of(words + 2);
  all[2].writeValue.value = 9;
  REQUIRE(enqueue(stream, 3, all, 0) == CUDA_SUCCESS);
  OK(cudaStreamSynchronize(stream));
  unsigned seen[4];
  OK(cudaMemcpy(seen, words, sizeof(seen), cudaMemcpyDeviceToHost));
  REQUIRE(seen[0] == 5 && seen[1] == 7 && seen[2] == 9 && seen[3] == 0);
  all[1].waitValue.value = 8;  // never
  REQUIRE(enqueue(stream, 2, all, 0) == CUDA_SUCCESS);
  REQUIRE(keeps_waiting(stream));
  const unsigned eight = 8;
  OK(cudaMemcpyAsync(words + 1, &eight, sizeof(eight), cudaMemcpyHostToDevice, new_stream()));
  OK(cudaStreamSynchronize(stream));
  all[0].writeValue.operation = CU_STREAM_MEM_OP_BARRIER;
  REQUIRE(enqueue(stream, 1, all, 0) == CUDA_ERROR_NOT_SUPPORTED);
  REQUIRE(enqueue(stream, 257, all, 0) == CUDA_ERROR_INVALID_VALUE);
}

// A device has a context from when a thread makes it current, or uses it.
void contexts() {
  const auto ask = find<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
  const auto is_active = [&](int device) {
    unsigned flags = 0;
    int active = -1;
    REQUIRE(ask(device, &flags, &active) == CUDA_SUCCESS);
    return active != 0;
  };
  int count = 0;
  OK(cudaGetDeviceCount(&count));
  REQUIRE(count >= 2 && !is_active(0) && !is_active(1) && counters().contexts == 0);
  OK(cudaSetDevice(1));
  REQUIRE(!is_active(0) && is_active(1) && counters().contexts == 1);
  device_ints(1);
  REQUIRE(!is_active(0));
  OK(cudaSetDevice(0));
  REQUIRE(is_active(0) && counters().contexts == 2);
}

// The counter wraps.
void values_wrap() {
  const ValueFunctions functions;
  cudaStream_t stream = new_stream();
  int* flag = device_ints(1);
  OK(cudaMemset(flag, 0, sizeof(int)));
  REQUIRE(functions.wait(stream, address_of(flag), 0xfffffff0u, CU_STREAM_WAIT_VALUE_GEQ) ==
          CUDA_SUCCESS);
  OK(cudaStreamSynchronize(stream));
}

}  // namespace

std::vector<RuntimeScenario> driver_scenarios() {
  return {
      {"entry_points", "functions by name", entry_points},
      {"address_range", "where an allocation begins", address_range},
      {"buffer_identity", "which allocation an address is in", buffer_identity},
      {"values", "streams that write and wait for values", values},
      {"batches", "several values in one call", batches},
      {"contexts", "which devices a process has used", contexts},
      {"values_wrap", "values are compared as counters", values_wrap},
  };
}

}  // namespace pycoll::sim::tests
