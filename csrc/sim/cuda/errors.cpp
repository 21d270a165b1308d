#include "sim/cuda/error_table.h"
#include "sim/cuda/runtime.h"

namespace pycoll::sim::cuda {
namespace {

const char* text_of(cudaError_t code, const char* ErrorText::*part) {
  for (const ErrorText& row : error_texts()) {
    if (row.code == code) return row.*part;
  }
  return "unrecognized error code";
}

// The error of a poisoned device is every call's.
cudaError_t last_error(const Call& call) {
  if (call.runtime.devices.empty()) return call.thread.last_error;
  const cudaError_t poison = call.device().poison;
  return poison != cudaSuccess ? poison : call.thread.last_error;
}

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

const char* cudaGetErrorName(cudaError_t code) {
  return text_of(code, &ErrorText::name);
}

const char* cudaGetErrorString(cudaError_t code) {
  return text_of(code, &ErrorText::text);
}

cudaError_t cudaPeekAtLastError() {
  const pycoll::sim::Quiet quiet;
  Runtime& runtime = Runtime::instance();
  Lock lock = lock_of_caller(runtime);
  return last_error({runtime, lock, this_thread()});
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  this_thread().last_error = cudaSuccess;
  return error;
}
