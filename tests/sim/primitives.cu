// Every operation of device/device.cuh once, for what nvcc makes of them
// (tests/test_cuda_compile.py).
#include "device/device.cuh"
#include "device/launch.cuh"

using namespace pycoll::device;

namespace {

struct Peers {
  const void* buffers[8];
};

template <Scope S, class T>
PYCOLL_DEVICE void every_access(T* p) {
  const T a = load_relaxed<S>(p), b = load_acquire<S>(p + 1);
  store_relaxed<S>(p + 2, a + b);
  store_release<S>(p + 3, a + 1);
  p[4] = fetch_add_relaxed<S>(p + 5, a) + fetch_add_acq_rel<S>(p + 6, b) +
         fetch_or_relaxed<S>(p + 7, a) + fetch_max_relaxed<S>(p + 7, b);
}

__global__ void __launch_bounds__(256) accesses(uint32_t* words, uint64_t* longs) {
  every_access<Scope::block>(words);
  every_access<Scope::device>(words + 8);
  every_access<Scope::system>(words + 16);
  every_access<Scope::block>(longs);
  every_access<Scope::device>(longs + 8);
  every_access<Scope::system>(longs + 16);
}

// Sums a rank's part of all peers' vectors, once its flag is up.
template <class T>
__global__ void __launch_bounds__(256)
    sum_peers(PYCOLL_GRID_CONSTANT Peers peers, int ranks, uint32_t* flag, T* out, int packs) {
  PYCOLL_SHARED(float, largest, 8);
  PYCOLL_DYNAMIC_SHARED(float, copies);
  if (threadIdx.x == 0) {
    const uint64_t began = timer_ns();
    while (static_cast<int>(load_acquire<Scope::system>(flag) - 1) < 0) {
      if (timer_ns() - began > 1'000'000'000) break;
      spin_pause();
    }
  }
  __syncthreads();
  float most = 0;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < packs;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    float sum[Pack<T>::kLength] = {};
    for (int rank = 0; rank < ranks; ++rank) {
      const Pack<T> pack =
          load_pack(static_cast<const T*>(peers.buffers[rank]) + i * Pack<T>::kLength);
      for (int k = 0; k < Pack<T>::kLength; ++k) sum[k] += to_float(pack.v[k]);
    }
    Pack<T> result;
    for (int k = 0; k < Pack<T>::kLength; ++k) {
      result.v[k] = from_float<T>(sum[k]);
      most = sum[k] > most ? sum[k] : most;
    }
    if (is_aligned16(out)) store_pack(out + i * Pack<T>::kLength, result);
  }
  for (int by = 16; by > 0; by /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, most, by);
    most = other > most ? other : most;
  }
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = copies[threadIdx.x / 32] = most;
  __syncwarp();
  const bool any = __any_sync(0xffffffffu, most > 1), all = __all_sync(0xffffffffu, most > 1);
  __syncthreads();
  if (threadIdx.x == 0 && any != all && __ballot_sync(1u, 1) == 1u) {
    fetch_or_relaxed<Scope::system>(flag, largest[1] > copies[2] ? 2u : 4u);
  }
}

}  // namespace

cudaError_t launch_primitives(cudaStream_t stream, void* out, uint32_t* words, uint64_t* longs) {
  const LaunchShape shape{dim3(4), dim3(256), 8 * sizeof(float)};
  const Peers peers{};
  if (const cudaError_t error = launch(accesses, shape, stream, words, longs);
      error != cudaSuccess) {
    return error;
  }
  launch(sum_peers<float>, shape, stream, peers, 8, words, static_cast<float*>(out), 100);
  launch(sum_peers<__half>, shape, stream, peers, 8, words, static_cast<__half*>(out), 100);
  launch(sum_peers<__nv_fp8_e4m3>, shape, stream, peers, 8, words, static_cast<__nv_fp8_e4m3*>(out),
         100);
  launch(sum_peers<__nv_fp8_e5m2>, shape, stream, peers, 8, words, static_cast<__nv_fp8_e5m2*>(out),
         100);
  return launch(sum_peers<__nv_bfloat16>, shape, stream, peers, 8, words,
                static_cast<__nv_bfloat16*>(out), 100);
}
