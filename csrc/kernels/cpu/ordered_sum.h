// Sums of squares in the order that kernels/fused.h fixes. As in reduce_loops.h, nothing with
// external linkage.
#pragma once

#include "kernels/cpu/reduce_loops.h"
#include "kernels/fused.h"
#include "kernels/fused_element.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace pycoll {
namespace {

// The least power of two that is not below n, kSumLanes at most. Partial sums beyond it are zeros,
// which may be left out: sums of squares are never -0.
PYCOLL_HD uint32_t lanes_for(uint64_t n) {
  uint32_t lanes = 1;
  while (lanes < n && lanes < kSumLanes) lanes *= 2;
  return lanes;
}

PYCOLL_LOOP double fold_lanes(double* lanes, uint32_t count) {
  for (uint32_t half = count / 2; half > 0; half /= 2) {
    PYCOLL_INDEPENDENT
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// A register of partial sums, and as many values.
constexpr uint32_t kSumVector = kVectorBytes / sizeof(double);
typedef double SumVector __attribute__((vector_size(kVectorBytes)));
template <typename T>
struct ValueVector {
  typedef T Type
      __attribute__((vector_size(kSumVector * sizeof(T)), aligned(alignof(T)), may_alias));
};

// A square of float32 is exact in float64, so that a fused multiplication and addition, which
// rounds once, gives the same bits as the two.
PYCOLL_HD SumVector add_square(SumVector sum, ValueVector<float>::Type values) {
  const auto wide = __builtin_convertvector(values, SumVector);
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(wide, wide, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(wide, wide, sum);
#else
  return sum + wide * wide;
#endif
}
PYCOLL_HD SumVector add_square(SumVector sum, ValueVector<double>::Type values) {
  return sum + values * values;
}

// Lanes of `rows` whole rows of kSumLanes values, which are in the first-level cache: so a register
// of sums goes down all rows before the next one does.
template <typename T>
PYCOLL_HD void sum_rows_of_squares(const T* x, uint32_t rows, double* lanes) {
  for (uint32_t lane = 0; lane < kSumLanes; lane += kSumVector) {
    SumVector sum = {};
    for (uint32_t row = 0; row < rows; ++row) {
      const T* from = x + row * kSumLanes + lane;
      const auto values = *reinterpret_cast<const typename ValueVector<T>::Type*>(from);
      sum = add_square(sum, values);
    }
    *reinterpret_cast<SumVector*>(lanes + lane) = sum;
  }
}

// Of a chunk; n is kSumChunk at most.
template <typename T>
PYCOLL_LOOP double sum_of_squares(const T* x, uint32_t n) {
  alignas(64) double lanes[kSumLanes];
  const uint32_t rows = n / kSumLanes, width = lanes_for(n);
  if (rows > 0) {
    sum_rows_of_squares(x, rows, lanes);
  } else {
    __builtin_memset(lanes, 0, width * sizeof(double));
  }
  const T* rest = x + rows * kSumLanes;
  for (uint32_t lane = 0; lane < n % kSumLanes; ++lane) lanes[lane] += element::square(rest[lane]);
  return fold_lanes(lanes, width);
}

// Of the sums of chunks, as they come.
class OrderedSum {
 public:
  PYCOLL_HD void add(double sum) {
    lanes_[chunks_ % kSumLanes] += sum;
    ++chunks_;
  }
  // Once.
  PYCOLL_HD double total() { return element::only_nan(fold_lanes(lanes_, lanes_for(chunks_))); }

 private:
  alignas(64) double lanes_[kSumLanes] = {};
  uint64_t chunks_ = 0;
};

}  // namespace
}  // namespace pycoll
