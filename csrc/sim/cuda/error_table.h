#pragma once

#include <cuda_runtime_api.h>

#include <span>

namespace pycoll::sim::cuda {

struct ErrorText {
  cudaError_t code;
  const char* name;
  const char* text;
};

std::span<const ErrorText> error_texts();

}  // namespace pycoll::sim::cuda
