// The loops behind the kernels of kernels/reduce.h.
//
// No function with external linkage may be instantiated here (see element.h): no containers, no
// algorithms, no calls of inline functions of other headers.
#pragma once

#include "kernels/cpu/half_lanes.h"
#include "kernels/element.h"

// Element i of dst depends on element i of the sources only, also when dst is one of them.
#if defined(__clang__)
#define PYCOLL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PYCOLL_INDEPENDENT _Pragma("GCC ivdep")
#endif

// One body each: a copy inlined into every caller would triple the library.
#define PYCOLL_LOOP __attribute__((noinline))

namespace pycoll {
namespace {

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

using element::Divide;
using element::Float16;

// Buffers have any alignment and any declared type, hence memcpy (a plain load once compiled).
template <typename T>
PYCOLL_HD T load(const void* base, size_t i) {
  T x;
  __builtin_memcpy(&x, static_cast<const char*>(base) + i * sizeof(T), sizeof(T));
  return x;
}
template <typename T>
PYCOLL_HD void store(void* base, size_t i, T x) {
  __builtin_memcpy(static_cast<char*>(base) + i * sizeof(T), &x, sizeof(T));
}

template <typename A, typename B, typename Acc, typename Op>
PYCOLL_LOOP void combine(void* dst, const void* a, const void* b, size_t n) {
  size_t i = 0;
  if constexpr (!std::is_same_v<Acc, Float16> &&
                (std::is_same_v<A, Float16> || std::is_same_v<B, Float16>)) {
    i = element::combine_lanes<A, B, Op>(dst, a, b, n);
  }
  PYCOLL_INDEPENDENT
  for (; i < n; ++i) {
    const Acc x = element::convert<Acc>(load<A>(a, i)), y = element::convert<Acc>(load<B>(b, i));
    store<Acc>(dst, i, Op{}(x, y));
  }
}

template <typename Value, typename Acc>
PYCOLL_LOOP void widen(void* dst, const void* src, size_t n) {
  size_t i = 0;
  if constexpr (std::is_same_v<Value, Float16>) {
    i = element::widen_lanes(dst, src, n);
  }
  PYCOLL_INDEPENDENT
  for (; i < n; ++i) {
    store<Acc>(dst, i, element::convert<Acc>(load<Value>(src, i)));
  }
}

template <bool kDivide, typename Value, typename Acc>
PYCOLL_HD Value finish_one(Acc x, Divide<Acc> divide) {
  return element::convert<Value>(kDivide ? divide(x) : x);
}

template <bool kDivide, typename Value, typename Acc>
PYCOLL_LOOP void finish(void* dst, const void* src, size_t n, int world_size) {
  const Divide<Acc> divide(world_size);
  size_t i = 0;
  if constexpr (std::is_same_v<Value, Acc>) {
    PYCOLL_INDEPENDENT
    for (; i < n; ++i) {
      store<Value>(dst, i, finish_one<kDivide, Value>(load<Acc>(src, i), divide));
    }
  } else {
    if constexpr (std::is_same_v<Value, Float16>) {
      i = element::finish_lanes<kDivide>(dst, src, n, world_size);
    }
    // Narrowing in place overwrites sources of this block and of earlier ones: read a block whole,
    // then write it.
    constexpr size_t kBlock = 64;
    Value block[kBlock];
    for (; i + kBlock <= n; i += kBlock) {
      for (size_t j = 0; j < kBlock; ++j) {
        block[j] = finish_one<kDivide, Value>(load<Acc>(src, i + j), divide);
      }
      __builtin_memcpy(static_cast<char*>(dst) + i * sizeof(Value), block, sizeof(block));
    }
    const size_t rest = n - i;
    for (size_t j = 0; j < rest; ++j) {
      block[j] = finish_one<kDivide, Value>(load<Acc>(src, i + j), divide);
    }
    __builtin_memcpy(static_cast<char*>(dst) + i * sizeof(Value), block, rest * sizeof(Value));
  }
}

template <typename Value, typename Acc>
PYCOLL_LOOP void scale(void* dst, const void* src, size_t n, double factor) {
  const Acc by = static_cast<Acc>(factor);
  PYCOLL_INDEPENDENT
  for (size_t i = 0; i < n; ++i) {
    const Acc x = element::convert<Acc>(load<Value>(src, i));
    store<Value>(dst, i, element::convert<Value>(element::Product{}(x, by)));
  }
}

// ---- Loops made of other loops, where one of their own is not worth its code. ----

// Operands are widened block by block on the stack, in the first-level cache, for a loop that takes
// accumulators.
template <typename Value, typename Acc, auto kCombine, bool kWidenA, bool kWidenB>
void combine_widened(void* dst, const void* a, const void* b, size_t n) {
  constexpr size_t kBlock = 256;
  alignas(64) Acc a_block[kBlock], b_block[kBlock];
  for (size_t i = 0; i < n; i += kBlock) {
    const size_t m = n - i < kBlock ? n - i : kBlock;
    const void* x = static_cast<const char*>(a) + i * (kWidenA ? sizeof(Value) : sizeof(Acc));
    const void* y = static_cast<const char*>(b) + i * (kWidenB ? sizeof(Value) : sizeof(Acc));
    if constexpr (kWidenA) {
      widen<Value, Acc>(a_block, x, m);
      x = a_block;
    }
    if constexpr (kWidenB) {
      widen<Value, Acc>(b_block, y, m);
      y = b_block;
    }
    kCombine(static_cast<char*>(dst) + i * sizeof(Acc), x, y, m);
  }
}

// Elements of kParts parts that are combined, finished and scaled on their own: complex numbers of
// two floats, integers of some bytes under bitwise operations.
template <auto kCombine, size_t kParts>
void combine_parts(void* dst, const void* a, const void* b, size_t n) {
  kCombine(dst, a, b, n * kParts);
}
template <auto kFinish, size_t kParts>
void finish_parts(void* dst, const void* src, size_t n, int world_size) {
  kFinish(dst, src, n * kParts, world_size);
}
template <auto kScale, size_t kParts>
void scale_parts(void* dst, const void* src, size_t n, double factor) {
  kScale(dst, src, n * kParts, factor);
}

}  // namespace
}  // namespace pycoll
