// What kernels are written in. Kernels include this header and launch.cuh and nothing else of CUDA
// or of the simulator; nvcc compiles them for a GPU, and g++ or clang++ (-x c++) for the SIMT
// executor of csrc/sim, where each CUDA thread is a fiber. What differs is in two headers,
// on_gpu.cuh (PTX) and on_simulator.cuh (calls into the executor). Both define:
//
//   PYCOLL_DEVICE
//       begins an inline device function; kernels are `__global__ void __launch_bounds__(N) name()`
//   PYCOLL_SHARED(T, name, n)
//       `T name[n]` in static shared memory
//   PYCOLL_DYNAMIC_SHARED(T, name)
//       `T* name`, the dynamic shared memory of the block, aligned to 16 bytes
//   load_acquire<Scope>(p), load_relaxed<Scope>(p),
//   store_release<Scope>(p, v), store_relaxed<Scope>(p, v)
//       T* p, T an unsigned integer of 32 or 64 bits, p aligned to its size. Each is one access: a
//       64-bit relaxed store may carry data and flag together, but orders nothing else.
//   fetch_add_relaxed<Scope>(p, v), fetch_add_acq_rel<Scope>(p, v), fetch_or_relaxed<Scope>(p, v),
//   fetch_max_relaxed<Scope>(p, v)
//       the same T; they return the value before
//   spin_pause()
//       once in every turn of a loop that waits for another thread
//   timer_ns()
//       nanoseconds of a clock that all threads of a device share
//
// and CUDA's own threadIdx, blockIdx, blockDim, gridDim, __syncthreads, __syncwarp, __shfl_sync,
// __shfl_xor_sync, __shfl_up_sync, __shfl_down_sync, __ballot_sync, __any_sync and __all_sync. Of
// these only __syncthreads and __syncwarp order memory, as on hardware.
//
// Flags between ranks: one writer each, a counter that only grows and is compared by wrapped
// difference, store_release<Scope::system> and load_acquire<Scope::system>. There is no fence on
// purpose: an acquire or release says which access it belongs to, so that tools can check it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/scope.h"

#if defined(__CUDACC__)
#include "device/on_gpu.cuh"
#else
#include "device/on_simulator.cuh"
#endif

// For tables of pointers that are passed by value: without it indexing one by a run-time value
// copies the table into every thread's local memory.
#define PYCOLL_GRID_CONSTANT const __grid_constant__

namespace pycoll::device {

// ---- Sixteen bytes at a time. ----

template <class T>
struct Pack {
  static constexpr int kLength = 16 / sizeof(T);
  alignas(16) T v[kLength];
};

PYCOLL_DEVICE bool is_aligned16(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

// p must be aligned to 16 bytes. Plain accesses, never through the non-coherent cache: a peer may
// have written there since the kernel began.
template <class T>
PYCOLL_DEVICE Pack<T> load_pack(const T* p, Caller caller = Caller::here()) {
  Pack<T> pack;
  load_16_bytes(p, &pack, caller);
  return pack;
}

template <class T>
PYCOLL_DEVICE void store_pack(T* p, const Pack<T>& pack, Caller caller = Caller::here()) {
  store_16_bytes(p, &pack, caller);
}

// ---- Floating-point formats. Everything is computed in float: host compilers have no half
// arithmetic, and a sum in float is rounded once. ----

// Exact.
PYCOLL_DEVICE float to_float(float x) {
  return x;
}
PYCOLL_DEVICE float to_float(__half x) {
  return __half2float(x);
}
PYCOLL_DEVICE float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
PYCOLL_DEVICE float to_float(__nv_fp8_e4m3 x) {
  return static_cast<float>(x);
}
PYCOLL_DEVICE float to_float(__nv_fp8_e5m2 x) {
  return static_cast<float>(x);
}

// To nearest, ties to even; out of range becomes infinity, or 448 in e4m3, which has no infinity.
// The same as on the CPU (kernels/float_formats.h), but for the payloads of NaN.
template <class T>
PYCOLL_DEVICE T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    static_assert(std::is_same_v<T, __nv_fp8_e4m3> || std::is_same_v<T, __nv_fp8_e5m2>);
    constexpr bool kE4M3 = std::is_same_v<T, __nv_fp8_e4m3>;
    T result;
    result.__x = __nv_cvt_float_to_fp8(x, kE4M3 ? __NV_SATFINITE : __NV_NOSAT,
                                       kE4M3 ? __NV_E4M3 : __NV_E5M2);
    return result;
  }
}

}  // namespace pycoll::device
