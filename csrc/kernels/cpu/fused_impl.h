// The kernels of kernels/fused.h, chunk by chunk in the first-level cache. Compiled once an
// instruction set; the rules of reduce_loops.h hold.
#pragma once

#include "kernels/cpu/float_tiles.h"
#include "kernels/cpu/ordered_sum.h"

namespace pycoll {
namespace {

// ---- Casts. ----

// Returns the bits of the largest magnitude, NaN above infinity. `to` may be `from`.
PYCOLL_LOOP uint32_t scale_and_look(const float* from, float* to, uint32_t n, float scale) {
  uint32_t largest = 0;
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) {
    const float y = element::scaled(from[i], scale);
    const uint32_t magnitude = element::bits_as<uint32_t>(y) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
    to[i] = y;
  }
  return largest;
}

bool cast_tensor(const CastTensor& tensor, float scale) {
  constexpr uint32_t kLimits[] = {element::kLeastNotFinite<float>,
                                  element::kLeastNotFinite<Float16>,
                                  element::kLeastNotFinite<BFloat16>};
  const bool read_in_place = is_float_array(tensor.from, tensor.source);
  const bool written_in_place = is_float_array(tensor.to, tensor.target);
  Tile room;
  uint32_t largest = 0;
  for (size_t first = 0; first < tensor.count; first += kTile) {
    const size_t rest = tensor.count - first;
    const auto n = static_cast<uint32_t>(rest < kTile ? rest : kTile);
    const float* from = static_cast<const float*>(tensor.source) + first;
    float* to = static_cast<float*>(tensor.target) + first;
    if (!read_in_place) {
      load_tile(tensor.from, tensor.source, first, n, room.value);
      from = room.value;
    }
    if (!written_in_place) to = room.value;
    const uint32_t found = scale_and_look(from, to, n, scale);
    largest = found > largest ? found : largest;
    if (!written_in_place) store_tile(tensor.to, to, tensor.target, first, n);
  }
  return largest >= kLimits[source_index(tensor.to)];
}

bool cast(const CastList& list, float scale) {
  bool found = false;
  for (size_t i = 0; i < list.count; ++i) found |= cast_tensor(list.tensors[i], scale);
  return found;
}

// ---- Lists that are multiplied in place. ----

// Room for a chunk of any type.
struct ChunkRoom {
  alignas(64) std::byte bytes[kSumChunk * sizeof(double)];
};

template <typename T>
PYCOLL_LOOP void multiply_values(T* x, uint32_t n, T factor) {
  PYCOLL_INDEPENDENT
  for (uint32_t i = 0; i < n; ++i) x[i] = element::scaled(x[i], factor);
}

// Whole vectors of bfloat16, as multiply_lanes() does those of float16; returns how many elements
// it did. The one NaN rounds to the one NaN without care of its own.
template <bool kLook>
PYCOLL_HD uint32_t multiply_upper_lanes(void* values, float* out, uint32_t n, float factor) {
  typedef float Floats __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Uppers __attribute__((vector_size(kVectorBytes / 2)));
  constexpr uint32_t kLanes = kVectorBytes / sizeof(float);
  const Floats nan = Floats{} + element::kQuietNanOf<float>;
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Words wide = __builtin_convertvector(load<Uppers>(values, i / kLanes), Words) << 16;
    const Floats product = reinterpret_cast<Floats>(wide) * factor;
    const Words bits = reinterpret_cast<Words>(product == product ? product : nan);
    const Words upper = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    store<Uppers>(values, i / kLanes, __builtin_convertvector(upper, Uppers));
    if constexpr (kLook) store<Words>(out, i / kLanes, upper << 16);
  }
  return i;
}

// The same of 16-bit floats; if kLook, products as they are stored also go to `out`, which has room
// for n in any case. Loop after loop: compilers vectorise each, but not all of it as one.
template <typename Value, bool kLook>
PYCOLL_LOOP void multiply_narrow(void* values, float* out, uint32_t n, float factor) {
  uint32_t done = 0;
  if constexpr (std::is_same_v<Value, Float16>) {
    done = static_cast<uint32_t>(element::multiply_lanes<kLook>(values, out, n, factor));
  } else {
    done = multiply_upper_lanes<kLook>(values, out, n, factor);
  }
  if (done == n) return;
  void* rest = static_cast<char*>(values) + done * sizeof(Value);
  out += done;
  widen<Value, float>(out, rest, n - done);
  multiply_values(out, n - done, factor);
  finish<false, Value, float>(rest, out, n - done, 1);
  if constexpr (kLook) widen<Value, float>(out, rest, n - done);
}

template <typename T>
PYCOLL_LOOP bool all_finite(const T* x, uint32_t n) {
  bool finite = true;
  for (uint32_t i = 0; i < n; ++i) finite &= element::is_finite(x[i]);
  return finite;
}

// Multiplies a chunk; if kLook, returns its values as they are stored, in the arithmetic type:
// where they are, or, if that is another type or memory that is not aligned for it, in `room`.
template <typename Value, typename Arithmetic, bool kLook>
const Arithmetic* multiply_chunk(void* values, uint32_t n, double factor, ChunkRoom& room) {
  const auto by = static_cast<Arithmetic>(factor);
  auto* x = reinterpret_cast<Arithmetic*>(room.bytes);
  if constexpr (!std::is_same_v<Value, Arithmetic>) {
    multiply_narrow<Value, kLook>(values, x, n, by);
  } else if (reinterpret_cast<uintptr_t>(values) % alignof(Value) == 0) {
    x = static_cast<Value*>(values);
    multiply_values(x, n, by);
  } else {
    __builtin_memcpy(x, values, n * sizeof(Value));
    multiply_values(x, n, by);
    __builtin_memcpy(values, x, n * sizeof(Value));
  }
  return x;
}

struct ChunkSum {
  double sum_of_squares;
  bool found_inf;
};

template <typename Value, typename Arithmetic>
ChunkSum unscale_chunk(void* values, uint32_t n, double factor, ChunkRoom& room) {
  const Arithmetic* x = multiply_chunk<Value, Arithmetic, true>(values, n, factor, room);
  const double sum = sum_of_squares(x, n);
  // Squares of float64 may overflow where the values do not, so it takes another look. A finite sum
  // has finite terms.
  return {sum, !element::is_finite(sum) && !all_finite(x, n)};
}

template <typename Value, typename Arithmetic>
void clip_chunk(void* values, uint32_t n, double factor, ChunkRoom& room) {
  multiply_chunk<Value, Arithmetic, false>(values, n, factor, room);
}

struct ChunkKernels {
  size_t bytes;  // an element
  ChunkSum (*unscale)(void* values, uint32_t n, double factor, ChunkRoom& room);
  void (*multiply)(void* values, uint32_t n, double factor, ChunkRoom& room);
};

template <typename Value, typename Arithmetic>
constexpr ChunkKernels kChunkKernels = {sizeof(Value), unscale_chunk<Value, Arithmetic>,
                                        clip_chunk<Value, Arithmetic>};

const ChunkKernels& chunk_kernels(DType dtype) {
  if (dtype == DType::float32) return kChunkKernels<float, float>;
  if (dtype == DType::float16) return kChunkKernels<Float16, float>;
  return dtype == DType::bfloat16 ? kChunkKernels<BFloat16, float> : kChunkKernels<double, double>;
}

// body(kernels, values, n) for every chunk of the list, in order.
template <typename Body>
PYCOLL_HD void for_each_chunk(const TensorList& list, const Body& body) {
  for (size_t i = 0; i < list.count; ++i) {
    const Tensor& tensor = list.tensors[i];
    const ChunkKernels& kernels = chunk_kernels(tensor.dtype);
    for (size_t first = 0; first < tensor.count; first += kSumChunk) {
      const size_t rest = tensor.count - first;
      body(kernels, static_cast<char*>(tensor.values) + first * kernels.bytes,
           static_cast<uint32_t>(rest < kSumChunk ? rest : kSumChunk));
    }
  }
}

Unscaled unscale(const TensorList& list, double factor) {
  ChunkRoom room;
  OrderedSum sum;
  bool found_inf = false;
  for_each_chunk(list, [&](const ChunkKernels& kernels, void* values, uint32_t n) {
    const ChunkSum chunk = kernels.unscale(values, n, factor, room);
    sum.add(chunk.sum_of_squares);
    found_inf |= chunk.found_inf;
  });
  return {found_inf, sum.total()};
}

void multiply(const TensorList& list, double factor) {
  ChunkRoom room;
  for_each_chunk(list, [&](const ChunkKernels& kernels, void* values, uint32_t n) {
    kernels.multiply(values, n, factor, room);
  });
}

constexpr FusedKernels kFusedKernels = {cast, unscale, multiply};

}  // namespace
}  // namespace pycoll
