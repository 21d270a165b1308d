// The kernels of kernels/reduce.h, compiled once an instruction set by reduce_<isa>.cpp.
//
// No function with external linkage may be instantiated here (see element.h): no containers, no
// algorithms, no calls of inline functions of other headers.
#pragma once

#include "kernels/cpu/half_lanes.h"
#include "kernels/cpu/reduce_table.h"
#include "kernels/element.h"

// Element i of dst depends on element i of the sources only, also when dst is one of them.
#if defined(__clang__)
#define PYCOLL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PYCOLL_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace pycoll {
namespace {

using element::BFloat16;
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
void combine(void* dst, const void* a, const void* b, size_t n) {
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
void widen(void* dst, const void* src, size_t n) {
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
void finish(void* dst, const void* src, size_t n, int world_size) {
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

// The kernels of one operation: Acc is what its partial results are held in.
template <typename Value, typename Acc, typename Op>
constexpr ReduceKernels kernels_of(DType value, DType acc, FinishFn finish_fn) {
  ReduceKernels kernels{value, acc, {}, nullptr, finish_fn};
  kernels.combine[0][0] = combine<Value, Value, Acc, Op>;
  kernels.combine[0][1] = combine<Value, Acc, Acc, Op>;
  kernels.combine[1][0] = combine<Acc, Value, Acc, Op>;
  kernels.combine[1][1] = combine<Acc, Acc, Acc, Op>;
  if constexpr (!std::is_same_v<Value, Acc>) {
    kernels.widen = widen<Value, Acc>;
  }
  return kernels;
}

// One type under all its operations. SUM, AVG and PRODUCT accumulate in `Acc`; MIN and MAX select
// one of the operands and so stay in the type itself.
template <typename V, DType kValue, typename Acc = V, DType kAcc = kValue>
struct Row {
  static constexpr FinishFn round = std::is_same_v<V, Acc> ? nullptr : finish<false, V, Acc>;
  static constexpr ReduceKernels sum = kernels_of<V, Acc, element::Sum>(kValue, kAcc, round);
  static constexpr ReduceKernels avg =
      kernels_of<V, Acc, element::Sum>(kValue, kAcc, finish<true, V, Acc>);
  static constexpr ReduceKernels product =
      kernels_of<V, Acc, element::Product>(kValue, kAcc, round);
  static constexpr ReduceKernels min = kernels_of<V, V, element::Min>(kValue, kValue, nullptr);
  static constexpr ReduceKernels max = kernels_of<V, V, element::Max>(kValue, kValue, nullptr);

  static constexpr void add_to(ReduceTable& table) {
    auto& entry = table.entry[static_cast<int>(kValue)];
    entry[static_cast<int>(ReduceOp::sum)] = &sum;
    entry[static_cast<int>(ReduceOp::avg)] = &avg;
    entry[static_cast<int>(ReduceOp::product)] = &product;
    entry[static_cast<int>(ReduceOp::min)] = &min;
    entry[static_cast<int>(ReduceOp::max)] = &max;
  }
};

template <typename... Rows>
constexpr ReduceTable table_of() {
  ReduceTable table{};
  (Rows::add_to(table), ...);
  return table;
}

constexpr ReduceTable make_reduce_table() {
  return table_of<Row<int8_t, DType::int8>, Row<int16_t, DType::int16>, Row<int32_t, DType::int32>,
                  Row<int64_t, DType::int64>, Row<uint8_t, DType::uint8>,
                  Row<float, DType::float32>, Row<double, DType::float64>,
                  Row<Float16, DType::float16, float, DType::float32>,
                  Row<BFloat16, DType::bfloat16, float, DType::float32>>();
}

}  // namespace
}  // namespace pycoll
