// Kernels over lists of tensors. A warp takes a chunk of a tensor at a time, and adds squares in
// the order that kernels/fused.h fixes: its threads own eight of the kSumLanes partial sums each.
#pragma once

#include "kernels/cuda/caster.cuh"
#include "kernels/cuda/fused.h"

namespace pycoll::cuda {

constexpr uint32_t kFusedThreads = 128;  // a block
constexpr uint32_t kBlocksAtOnce = 4;    // on a multiprocessor: 32 KiB under way there
constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kWarpsOfBlock = kFusedThreads / kWarpThreads;
constexpr int kSumsOfThread = kSumLanes / kWarpThreads;

PYCOLL_DEVICE uint32_t lane_of_warp() {
  return threadIdx.x % kWarpThreads;
}

// ---- Lists. ----

// The last row that does not begin behind the chunk.
PYCOLL_DEVICE const TensorRow& row_of(const TensorTable& table, uint64_t chunk) {
  uint32_t low = 0, high = table.tensors;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    if (table.rows[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return table.rows[low];
}

// body(chunk, row, first element, elements) for the chunks of this warp.
template <class Body>
PYCOLL_DEVICE void for_each_chunk(const TensorTable& table, const Body& body) {
  const uint64_t warps = uint64_t{gridDim.x} * kWarpsOfBlock;
  uint64_t chunk = uint64_t{blockIdx.x} * kWarpsOfBlock + threadIdx.x / kWarpThreads;
  for (; chunk < table.chunks; chunk += warps) {
    const TensorRow& row = row_of(table, chunk);
    const uint64_t first = (chunk - row.first_chunk) * kSumChunk, rest = row.count - first;
    body(chunk, row, first, static_cast<uint32_t>(rest < kSumChunk ? rest : kSumChunk));
  }
}

// In bytes: where nvcc adds elements to elements it forgets that packs are aligned, and stores them
// in parts.
template <class T>
PYCOLL_DEVICE T* elements_of(void* vector, uint64_t first) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(vector) + first * sizeof(T));
}
template <class T>
PYCOLL_DEVICE T* elements_of(const void* vector, uint64_t first) {
  return reinterpret_cast<T*>(static_cast<const std::byte*>(vector) + first * sizeof(T));
}

template <class T>
struct OfType {
  using Type = T;
};
template <class Body>
PYCOLL_DEVICE void with_narrow_type(DType dtype, const Body& body) {
  if (dtype == DType::float32) {
    body(OfType<float>{});
  } else if (dtype == DType::float16) {
    body(OfType<__half>{});
  } else {
    body(OfType<__nv_bfloat16>{});
  }
}
template <class Body>
PYCOLL_DEVICE void with_type(DType dtype, const Body& body) {
  if (dtype == DType::float64) {
    body(OfType<double>{});
  } else {
    with_narrow_type(dtype, body);
  }
}

// ---- Products and sums. ----

// In the arithmetic type.
PYCOLL_DEVICE double widened(double x) {
  return x;
}
template <class T>
PYCOLL_DEVICE float widened(T x) {
  return device::to_float(x);
}

PYCOLL_DEVICE double multiplied(double x, double factor) {
  return element::scaled(x, factor);
}
template <class T>
PYCOLL_DEVICE T multiplied(T x, double factor) {
  return rounded<T>(element::scaled(device::to_float(x), static_cast<float>(factor)));
}

// Multiplies chunks of T in place; if kLook, adds squares of the results to this thread's sums.
template <class T, bool kLook>
class ChunkMultiplier {
 public:
  PYCOLL_DEVICE explicit ChunkMultiplier(double factor) : factor_(factor) {}

  PYCOLL_DEVICE void run(T* x, uint32_t n) {
    packed_ = low_bits(x) == 0;
    const uint32_t rows = n / kSumLanes;
    uint32_t row = 0;
    if (packed_) {
      for (; row + kRows <= rows; row += kRows) multiply_packs<kRows>(x + row * kSumLanes);
      for (; row < rows; ++row) multiply_packs<1>(x + row * kSumLanes);
    }
    for (; row < rows; ++row) multiply_row(x + row * kSumLanes, kSumLanes);
    if (n % kSumLanes > 0) multiply_row(x + rows * kSumLanes, n % kSumLanes);
  }

  PYCOLL_DEVICE bool found_inf() const { return found_inf_; }

  // The sum of all threads' sums in lane 0, by kSumLanes places in memory that the warp shares.
  PYCOLL_DEVICE double fold(double* lanes) const {
    double sums[kSumsOfThread];
#pragma unroll
    for (int i = 0; i < kSumsOfThread; ++i) lanes[lane_of(i)] = sums_[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSumsOfThread; ++i) sums[i] = lanes[i * kWarpThreads + lane_of_warp()];
    __syncwarp();  // the next chunk writes there
#pragma unroll
    for (int half = kSumsOfThread / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
#pragma unroll
    for (int half = kWarpThreads / 2; half > 0; half /= 2) {
      sums[0] += __shfl_down_sync(0xffffffffu, sums[0], half);
    }
    return sums[0];
  }

 private:
  static constexpr int kLength = device::Pack<T>::kLength;
  static constexpr int kPacks = kSumsOfThread / kLength;     // of a thread in a row
  static constexpr int kRows = kPacks < 4 ? 4 / kPacks : 1;  // at a time: 64 bytes a thread

  // Which of kSumLanes this thread's i-th sum is.
  PYCOLL_DEVICE uint32_t lane_of(int i) const {
    const uint32_t thread = lane_of_warp();
    const uint32_t pack = i / kLength, place = i % kLength;
    return packed_ ? (pack * kWarpThreads + thread) * kLength + place : i * kWarpThreads + thread;
  }

  PYCOLL_DEVICE T one(T x, double& sum) {
    const T y = multiplied(x, factor_);
    if constexpr (kLook) {
      found_inf_ |= !element::is_finite(widened(y));
      sum += element::square(widened(y));
    }
    return y;
  }

  template <int kCount>
  PYCOLL_DEVICE void multiply_packs(T* x) {
    device::Pack<T> packs[kCount][kPacks];
#pragma unroll
    for (int row = 0; row < kCount; ++row) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) packs[row][k] = device::load_pack(x + pack_at(row, k));
    }
#pragma unroll
    for (int row = 0; row < kCount; ++row) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          packs[row][k].v[i] = one(packs[row][k].v[i], sums_[k * kLength + i]);
        }
        device::store_pack(x + pack_at(row, k), packs[row][k]);
      }
    }
  }
  static PYCOLL_DEVICE uint32_t pack_at(int row, int pack) {
    return row * kSumLanes + (pack * kWarpThreads + lane_of_warp()) * kLength;
  }

  // Element by element; n is kSumLanes at most.
  PYCOLL_DEVICE void multiply_row(T* x, uint32_t n) {
    T values[kSumsOfThread];
#pragma unroll
    for (int i = 0; i < kSumsOfThread; ++i) {
      if (lane_of(i) < n) values[i] = x[lane_of(i)];
    }
#pragma unroll
    for (int i = 0; i < kSumsOfThread; ++i) {
      if (lane_of(i) < n) x[lane_of(i)] = one(values[i], sums_[i]);
    }
  }

  double factor_;
  double sums_[kSumsOfThread] = {};
  bool packed_ = false;
  bool found_inf_ = false;
};

PYCOLL_DEVICE double value_of(const Factor& factor) {
  return factor.device_value == nullptr ? factor.value : static_cast<double>(*factor.device_value);
}

// ---- Kernels. ----

__global__ void __launch_bounds__(kFusedThreads, kBlocksAtOnce)
    cast_list_kernel(PYCOLL_GRID_CONSTANT CastListCall in) {
  const Team warp{lane_of_warp(), kWarpThreads};
  bool found = false;
  for_each_chunk(in.table, [&](uint64_t, const TensorRow& row, uint64_t first, uint32_t n) {
    with_narrow_type(row.from, [&](auto from) {
      with_narrow_type(row.dtype, [&](auto to) {
        using From = typename decltype(from)::Type;
        using To = typename decltype(to)::Type;
        Caster<From, To> caster(elements_of<const From>(row.source, first),
                                elements_of<To>(row.values, first), in.scale);
        caster.run(warp, n);
        found |= caster.found_inf();
      });
    });
  });
  report_found_inf(found, in.found_inf);
}

__global__ void __launch_bounds__(kFusedThreads, kBlocksAtOnce)
    unscale_list_kernel(PYCOLL_GRID_CONSTANT UnscaleListCall in) {
  PYCOLL_SHARED(double, lanes, kWarpsOfBlock* kSumLanes);
  double* const lanes_of_warp = lanes + threadIdx.x / kWarpThreads * kSumLanes;
  const double factor = value_of(in.factor);
  bool found = false;
  for_each_chunk(in.table, [&](uint64_t chunk, const TensorRow& row, uint64_t first, uint32_t n) {
    with_type(row.dtype, [&](auto type) {
      using T = typename decltype(type)::Type;
      ChunkMultiplier<T, true> multiplier(factor);
      multiplier.run(elements_of<T>(row.values, first), n);
      found |= multiplier.found_inf();
      const double sum = multiplier.fold(lanes_of_warp);
      if (lane_of_warp() == 0) in.chunk_sums[chunk] = sum;
    });
  });
  report_found_inf(found, in.found_inf);
}

// One block: the sums of chunks, in the same order.
__global__ void __launch_bounds__(kFusedThreads, kBlocksAtOnce)
    sum_chunks_kernel(const double* chunk_sums, uint64_t chunks, double* sum_of_squares) {
  PYCOLL_SHARED(double, lanes, kSumLanes);
  for (uint32_t lane = threadIdx.x; lane < kSumLanes; lane += kFusedThreads) {
    double sum = 0;
    for (uint64_t chunk = lane; chunk < chunks; chunk += kSumLanes) sum += chunk_sums[chunk];
    lanes[lane] = sum;
  }
  for (uint32_t half = kSumLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *sum_of_squares = element::only_nan(lanes[0]);
}

struct MultiplyArguments {
  TensorTable table;
  Factor factor;
  const double* sum_of_squares;  // not nullptr: clip to max_norm instead
  double max_norm;
};

// The rule of torch.nn.utils.clip_grad_norm_, in float64. NaN stays NaN.
PYCOLL_DEVICE double clip_factor(double sum_of_squares, double max_norm) {
  const double factor = max_norm / (sqrt(sum_of_squares) + 1e-6);
  return factor >= 1 ? 1.0 : factor;
}

__global__ void __launch_bounds__(kFusedThreads, kBlocksAtOnce)
    multiply_list_kernel(PYCOLL_GRID_CONSTANT MultiplyArguments in) {
  const bool clips = in.sum_of_squares != nullptr;
  const double factor = clips ? clip_factor(*in.sum_of_squares, in.max_norm) : value_of(in.factor);
  if (clips && factor == 1) return;
  for_each_chunk(in.table, [&](uint64_t, const TensorRow& row, uint64_t first, uint32_t n) {
    with_type(row.dtype, [&](auto type) {
      using T = typename decltype(type)::Type;
      ChunkMultiplier<T, false> multiplier(factor);
      multiplier.run(elements_of<T>(row.values, first), n);
    });
  });
}

}  // namespace pycoll::cuda
