// Whole numbers as elements of the types that kernels are checked with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "core/dtype.h"

namespace pycoll::gpu_tests {

template <class T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16(x);
  } else {
    return static_cast<T>(x);
  }
}

template <class T>
float to_float(T x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else {
    return static_cast<float>(x);
  }
}

// body(T{}) for the element type.
template <class Body>
auto with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float16:
      return body(__half{});
    case DType::bfloat16:
      return body(__nv_bfloat16{});
    case DType::float32:
      return body(float{});
    case DType::float64:
      return body(double{});
    case DType::int32:
      return body(int32_t{});
    case DType::int64:
      return body(int64_t{});
    default:
      throw std::invalid_argument("no numbers of that type");
  }
}

inline void encode(DType dtype, float x, std::byte* to) {
  with_type(dtype, [&](auto type) {
    type = from_float<decltype(type)>(x);
    std::memcpy(to, &type, sizeof(type));
  });
}

inline float decode(DType dtype, const std::byte* from) {
  return with_type(dtype, [&](auto type) {
    std::memcpy(static_cast<void*>(&type), from, sizeof(type));
    return to_float(type);
  });
}

}  // namespace pycoll::gpu_tests
