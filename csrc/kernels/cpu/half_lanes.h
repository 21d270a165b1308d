// float16 by vector conversion instructions, which no compiler emits from the integer form.
//
// Each loop handles whole vectors and returns how many elements it did; the portable loop that
// follows does the rest, with the same bits. Without such instructions they do nothing.
#pragma once

#include "kernels/element.h"

#if defined(__AVX512F__) || (defined(__F16C__) && defined(__AVX2__))
#define PYCOLL_HALF_LANES 1
#include <immintrin.h>
#else
#define PYCOLL_HALF_LANES 0
#endif

namespace pycoll::element {
namespace {

#if PYCOLL_HALF_LANES

#if defined(__AVX512F__)
using Lanes = __m512;
// The masked forms with every bit set are the plain instructions; gcc 12 warns of an uninitialised
// variable inside its own plain intrinsics.
constexpr __mmask16 kAll = 0xffff;
PYCOLL_HD Lanes load_lanes(const Float16* p) {
  return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PYCOLL_HD Lanes load_lanes(const float* p) {
  return _mm512_loadu_ps(p);
}
PYCOLL_HD void store_lanes(Float16* p, Lanes x) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p),
      _mm512_maskz_cvtps_ph(kAll, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PYCOLL_HD void store_lanes(float* p, Lanes x) {
  _mm512_storeu_ps(p, x);
}
PYCOLL_HD Lanes all_lanes(float x) {
  return _mm512_set1_ps(x);
}
#else
using Lanes = __m256;
PYCOLL_HD Lanes load_lanes(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PYCOLL_HD Lanes load_lanes(const float* p) {
  return _mm256_loadu_ps(p);
}
PYCOLL_HD void store_lanes(Float16* p, Lanes x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
PYCOLL_HD void store_lanes(float* p, Lanes x) {
  _mm256_storeu_ps(p, x);
}
PYCOLL_HD Lanes all_lanes(float x) {
  return _mm256_set1_ps(x);
}
#endif

constexpr size_t kLanes = sizeof(Lanes) / sizeof(float);

// The casts below only compute addresses: every access goes through the unaligned, may-alias
// intrinsics above.
template <typename T>
PYCOLL_HD const T* at(const void* base, size_t i) {
  return static_cast<const T*>(base) + i;
}
template <typename T>
PYCOLL_HD T* at(void* base, size_t i) {
  return static_cast<T*>(base) + i;
}

#endif  // PYCOLL_HALF_LANES

template <typename A, typename B, typename Op>
PYCOLL_HD size_t combine_lanes([[maybe_unused]] void* dst, [[maybe_unused]] const void* a,
                               [[maybe_unused]] const void* b, [[maybe_unused]] size_t n) {
  size_t i = 0;
#if PYCOLL_HALF_LANES
  for (; i + kLanes <= n; i += kLanes) {
    store_lanes(at<float>(dst, i), Op{}(load_lanes(at<A>(a, i)), load_lanes(at<B>(b, i))));
  }
#endif
  return i;
}

PYCOLL_HD size_t widen_lanes([[maybe_unused]] void* dst, [[maybe_unused]] const void* src,
                             [[maybe_unused]] size_t n) {
  size_t i = 0;
#if PYCOLL_HALF_LANES
  for (; i + kLanes <= n; i += kLanes) {
    store_lanes(at<float>(dst, i), load_lanes(at<Float16>(src, i)));
  }
#endif
  return i;
}

// In place (dst == src) a vector is read before anything at or below it is written.
template <bool kDivide>
PYCOLL_HD size_t finish_lanes([[maybe_unused]] void* dst, [[maybe_unused]] const void* src,
                              [[maybe_unused]] size_t n, [[maybe_unused]] int world_size) {
  size_t i = 0;
#if PYCOLL_HALF_LANES
  const Lanes divisor = all_lanes(static_cast<float>(world_size));
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes x = load_lanes(at<float>(src, i));
    store_lanes(at<Float16>(dst, i), kDivide ? x / divisor : x);
  }
#endif
  return i;
}

// values[i] *= factor, NaN made the one NaN; if kLook, products as they are stored also go to
// `out`.
template <bool kLook>
PYCOLL_HD size_t multiply_lanes([[maybe_unused]] void* values, [[maybe_unused]] float* out,
                                [[maybe_unused]] size_t n, [[maybe_unused]] float factor) {
  size_t i = 0;
#if PYCOLL_HALF_LANES
  const Lanes by = all_lanes(factor), nan = all_lanes(kQuietNanOf<float>);
  for (; i + kLanes <= n; i += kLanes) {
    const Lanes product = load_lanes(at<Float16>(values, i)) * by;
    store_lanes(at<Float16>(values, i), product == product ? product : nan);
    if constexpr (kLook) store_lanes(out + i, load_lanes(at<Float16>(values, i)));
  }
#endif
  return i;
}

}  // namespace
}  // namespace pycoll::element
