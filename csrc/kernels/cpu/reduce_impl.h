// The kernels of kernels/reduce.h as a table, compiled once an instruction set by reduce_<isa>.cpp:
// which loops serve which type and operation. The rules of reduce_loops.h hold here too.
#pragma once

#include "kernels/cpu/reduce_loops.h"
#include "kernels/cpu/reduce_table.h"
#include "kernels/cpu/sum_rows.h"

namespace pycoll {
namespace {

using element::BFloat16;
using element::Bool8;
using element::Float8E4M3;
using element::Float8E5M2;

// The kernels of an operation whose partial results have the type of the elements.
constexpr ReduceKernels plain(DType dtype, CombineFn combine_fn, FinishFn finish_fn = nullptr,
                              ScaleFn scale_fn = nullptr, SumRowsFn rows_fn = nullptr) {
  return {.value = dtype,
          .acc = dtype,
          .combine = {{combine_fn, combine_fn}, {combine_fn, combine_fn}},
          .widen = nullptr,
          .finish = finish_fn,
          .sum_rows = rows_fn,
          .scale = scale_fn};
}

// One loop for every form of the operands: for what training does all the time.
template <typename Value, typename Acc, typename Op>
constexpr ReduceKernels fused(DType value, DType acc, FinishFn finish_fn, ScaleFn scale_fn) {
  return {.value = value,
          .acc = acc,
          .combine = {{combine<Value, Value, Acc, Op>, combine<Value, Acc, Acc, Op>},
                      {combine<Acc, Value, Acc, Op>, combine<Acc, Acc, Acc, Op>}},
          .widen = widen<Value, Acc>,
          .finish = finish_fn,
          .sum_rows = nullptr,
          .scale = scale_fn};
}

// One loop, on accumulators; values are widened for it.
template <typename Value, typename Acc, typename Op>
constexpr ReduceKernels widened(DType value, DType acc, FinishFn finish_fn, ScaleFn scale_fn) {
  constexpr auto inner = combine<Acc, Acc, Acc, Op>;
  return {.value = value,
          .acc = acc,
          .combine = {{combine_widened<Value, Acc, inner, true, true>,
                       combine_widened<Value, Acc, inner, true, false>},
                      {combine_widened<Value, Acc, inner, false, true>, inner}},
          .widen = widen<Value, Acc>,
          .finish = finish_fn,
          .sum_rows = nullptr,
          .scale = scale_fn};
}

constexpr void set(ReduceTable& table, ReduceOp op, const ReduceKernels& kernels) {
  table.entry[static_cast<int>(kernels.value)][static_cast<int>(op)] = &kernels;
}

// ---- One row a type. ----

template <DType kType>
struct BoolRow {
  static constexpr ReduceKernels all = plain(kType, combine<Bool8, Bool8, Bool8, element::And>);
  static constexpr ReduceKernels any = plain(kType, combine<Bool8, Bool8, Bool8, element::Or>);
  static constexpr ReduceKernels odd = plain(kType, combine<Bool8, Bool8, Bool8, element::Xor>);

  static constexpr void add_to(ReduceTable& table) {
    set(table, ReduceOp::sum, any);
    set(table, ReduceOp::max, any);
    set(table, ReduceOp::bor, any);
    set(table, ReduceOp::product, all);
    set(table, ReduceOp::min, all);
    set(table, ReduceOp::band, all);
    // The number of true ones over the world size, truncated: 1 only when all are.
    set(table, ReduceOp::avg, all);
    set(table, ReduceOp::bxor, odd);
  }
};

// `Unsigned` has the bits of V: wrapping arithmetic is the same for both. Acc holds sums of AVG.
template <typename V, DType kType, typename Unsigned, typename Acc = V, DType kAcc = kType>
struct IntegerRow {
  template <typename Op>
  static constexpr ReduceKernels wrapping() {
    return plain(kType, combine<Unsigned, Unsigned, Unsigned, Op>);
  }
  template <typename Op>
  static constexpr ReduceKernels bitwise() {
    return plain(kType, combine_parts<combine<uint8_t, uint8_t, uint8_t, Op>, sizeof(V)>);
  }
  static constexpr ReduceKernels average() {
    constexpr FinishFn divide = finish<true, V, Acc>;
    if constexpr (std::is_same_v<V, Acc>) {
      return plain(kType, combine<Unsigned, Unsigned, Unsigned, element::Sum>, divide);
    } else {
      return widened<V, Acc, element::Sum>(kType, kAcc, divide, nullptr);
    }
  }
  static constexpr ReduceKernels sum = wrapping<element::Sum>();
  static constexpr ReduceKernels avg = average();
  static constexpr ReduceKernels product = wrapping<element::Product>();
  static constexpr ReduceKernels min = plain(kType, combine<V, V, V, element::Min>);
  static constexpr ReduceKernels max = plain(kType, combine<V, V, V, element::Max>);
  static constexpr ReduceKernels band = bitwise<element::And>();
  static constexpr ReduceKernels bor = bitwise<element::Or>();
  static constexpr ReduceKernels bxor = bitwise<element::Xor>();

  static constexpr void add_to(ReduceTable& table) {
    set(table, ReduceOp::sum, sum);
    set(table, ReduceOp::avg, avg);
    set(table, ReduceOp::product, product);
    set(table, ReduceOp::min, min);
    set(table, ReduceOp::max, max);
    set(table, ReduceOp::band, band);
    set(table, ReduceOp::bor, bor);
    set(table, ReduceOp::bxor, bxor);
  }
};

template <typename V, DType kType>
struct FloatRow {
  static constexpr CombineFn add = combine<V, V, V, element::Sum>;
  static constexpr SumRowsFn rows = sum_rows<V, element::Sum, false>;
  static constexpr ReduceKernels sum = plain(kType, add, nullptr, nullptr, rows);
  static constexpr ReduceKernels premul_sum = plain(kType, add, nullptr, scale<V, V>, rows);
  static constexpr ReduceKernels avg =
      plain(kType, add, finish<true, V, V>, nullptr, sum_rows<V, element::Sum, true>);
  static constexpr ReduceKernels product = plain(kType, combine<V, V, V, element::Product>);
  static constexpr ReduceKernels min = plain(kType, combine<V, V, V, element::Min>);
  static constexpr ReduceKernels max = plain(kType, combine<V, V, V, element::Max>);

  static constexpr void add_to(ReduceTable& table) {
    set(table, ReduceOp::sum, sum);
    set(table, ReduceOp::premul_sum, premul_sum);
    set(table, ReduceOp::avg, avg);
    set(table, ReduceOp::product, product);
    set(table, ReduceOp::min, min);
    set(table, ReduceOp::max, max);
  }
};

// Held in float32 and rounded at the end. MIN and MAX select an operand and stay in the type.
template <typename V, DType kType, bool kFusedSum>
struct NarrowFloatRow {
  static constexpr FinishFn round = finish<false, V, float>;
  static constexpr ReduceKernels sum_with(FinishFn finish_fn, ScaleFn scale_fn) {
    if constexpr (kFusedSum) {
      return fused<V, float, element::Sum>(kType, DType::float32, finish_fn, scale_fn);
    } else {
      return widened<V, float, element::Sum>(kType, DType::float32, finish_fn, scale_fn);
    }
  }
  static constexpr ReduceKernels sum = sum_with(round, nullptr);
  static constexpr ReduceKernels premul_sum = sum_with(round, scale<V, float>);
  static constexpr ReduceKernels avg = sum_with(finish<true, V, float>, nullptr);
  static constexpr ReduceKernels product =
      widened<V, float, element::Product>(kType, DType::float32, round, nullptr);
  static constexpr ReduceKernels min = plain(kType, combine<V, V, V, element::Min>);
  static constexpr ReduceKernels max = plain(kType, combine<V, V, V, element::Max>);

  static constexpr void add_to(ReduceTable& table) {
    set(table, ReduceOp::sum, sum);
    set(table, ReduceOp::premul_sum, premul_sum);
    set(table, ReduceOp::avg, avg);
    set(table, ReduceOp::product, product);
    set(table, ReduceOp::min, min);
    set(table, ReduceOp::max, max);
  }
};

template <typename Part, DType kType>
struct ComplexRow {
  static constexpr CombineFn add = combine_parts<combine<Part, Part, Part, element::Sum>, 2>;
  static constexpr ReduceKernels sum = plain(kType, add);
  static constexpr ReduceKernels premul_sum =
      plain(kType, add, nullptr, scale_parts<scale<Part, Part>, 2>);
  static constexpr ReduceKernels avg = plain(kType, add, finish_parts<finish<true, Part, Part>, 2>);

  static constexpr void add_to(ReduceTable& table) {
    set(table, ReduceOp::sum, sum);
    set(table, ReduceOp::premul_sum, premul_sum);
    set(table, ReduceOp::avg, avg);
  }
};

template <typename... Rows>
constexpr ReduceTable table_of() {
  ReduceTable table{};
  (Rows::add_to(table), ...);
  return table;
}

constexpr ReduceTable make_reduce_table() {
  return table_of<BoolRow<DType::bool8>,  //
                  IntegerRow<int8_t, DType::int8, uint8_t, int32_t, DType::int32>,
                  IntegerRow<int16_t, DType::int16, uint16_t, int32_t, DType::int32>,
                  IntegerRow<int32_t, DType::int32, uint32_t, int64_t, DType::int64>,
                  IntegerRow<int64_t, DType::int64, uint64_t>,
                  IntegerRow<uint8_t, DType::uint8, uint8_t, uint32_t, DType::uint32>,
                  IntegerRow<uint16_t, DType::uint16, uint16_t, uint32_t, DType::uint32>,
                  IntegerRow<uint32_t, DType::uint32, uint32_t, uint64_t, DType::uint64>,
                  IntegerRow<uint64_t, DType::uint64, uint64_t>,  //
                  FloatRow<float, DType::float32>, FloatRow<double, DType::float64>,
                  NarrowFloatRow<Float16, DType::float16, true>,
                  NarrowFloatRow<BFloat16, DType::bfloat16, true>,
                  NarrowFloatRow<Float8E4M3, DType::float8_e4m3fn, false>,
                  NarrowFloatRow<Float8E5M2, DType::float8_e5m2, false>,
                  ComplexRow<float, DType::complex64>, ComplexRow<double, DType::complex128>>();
}

}  // namespace
}  // namespace pycoll
