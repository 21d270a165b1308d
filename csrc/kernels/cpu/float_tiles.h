// Pieces of vectors of float32, float16 or bfloat16, as float32 in the first-level cache. As in
// reduce_loops.h, nothing with external linkage.
#pragma once

#include "kernels/cpu/reduce_loops.h"
#include "kernels/reduce.h"

namespace pycoll {
namespace {

using element::BFloat16;

constexpr uint32_t kTile = 1024;      // values that are worked on at a time
constexpr uint32_t kTileRoom = 4096;  // the most that a tile may have

struct Tile {
  alignas(64) float value[kTileRoom];
};

bool is_float_array(DType dtype, const void* values) {
  return dtype == DType::float32 && reinterpret_cast<uintptr_t>(values) % alignof(float) == 0;
}

constexpr size_t kElementBytes[] = {4, 2, 2};
size_t source_index(DType dtype) {
  if (dtype == DType::float32) return 0;
  return dtype == DType::float16 ? 1 : 2;
}

void load_tile(DType dtype, const void* values, size_t first, uint32_t n, float* out) {
  constexpr WidenFn kWiden[] = {nullptr, widen<Float16, float>, widen<BFloat16, float>};
  const size_t index = source_index(dtype);
  const void* from = static_cast<const char*>(values) + first * kElementBytes[index];
  if (index == 0) {
    __builtin_memcpy(out, from, n * sizeof(float));
  } else {
    kWiden[index](out, from, n);
  }
}

void store_tile(DType dtype, const float* x, void* values, size_t first, uint32_t n) {
  constexpr FinishFn kRound[] = {nullptr, finish<false, Float16, float>,
                                 finish<false, BFloat16, float>};
  const size_t index = source_index(dtype);
  void* to = static_cast<char*>(values) + first * kElementBytes[index];
  if (index == 0) {
    __builtin_memcpy(to, x, n * sizeof(float));
  } else {
    kRound[index](to, x, n, 1);
  }
}

}  // namespace
}  // namespace pycoll
