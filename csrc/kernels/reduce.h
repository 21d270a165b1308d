// Elementwise kernels: a table by element type, reduce operation and instruction set.
//
// A *value* is an element as the caller has it; an *accumulator* holds a partial sum. It is the
// type itself but for
//   float16, bfloat16, float8   float32 under SUM, AVG, PRODUCT and PREMUL_SUM: rounded once, at
//   the end integers below 64 bits      the next of 32 or 64 bits under AVG, so that the sum does
//   not wrap
// Where both operands are NaN, SUM and PRODUCT give the first one's payload, at every length and
// alignment. MIN and MAX return one of the operands unchanged: they propagate NaN (the first
// operand's when both are) and order -0 below +0. Integers wrap. A bool is true when its byte is
// not 0; results are 0 and 1. All instruction sets give the same bits (no contraction to FMA).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "core/dtype.h"

namespace pycoll {

enum class Operand : int { value = 0, acc = 1 };

// Buffers may have any alignment.

// dst[i] = a[i] (+) b[i], dst accumulators. dst may be exactly a or exactly b where that operand
// holds accumulators; other overlap is not allowed.
using CombineFn = void (*)(void* dst, const void* a, const void* b, size_t n);
// dst[i] = accumulator of src[i]. No overlap.
using WidenFn = void (*)(void* dst, const void* src, size_t n);
// dst[i] = value of src[i]: AVG divides by world_size (> 0; integers truncate toward zero), then it
// rounds. dst may be exactly src.
using FinishFn = void (*)(void* dst, const void* src, size_t n, int world_size);
// dst[i] = src[i] * factor, both values, rounded once; complex numbers have both parts scaled. The
// factor is first rounded to the type, to float32 for narrower ones. dst may be exactly src.
using ScaleFn = void (*)(void* dst, const void* src, size_t n, double factor);

// Vectors of values that are summed, and the places that all get the sum. A target may be exactly a
// term; other overlap is not allowed.
struct SumRows {
  const std::byte* const* terms;
  size_t term_count;  // 1 at least
  std::byte* const* targets;
  size_t target_count;
};
// Elements [begin, end): targets[j][i] = terms[0][i] (+) terms[1][i] (+) ..., in that order, and
// finished. The bits are those of combine and finish.
using SumRowsFn = void (*)(const SumRows& rows, size_t begin, size_t end, int world_size);

struct ReduceKernels {
  DType value;
  DType acc;
  CombineFn combine[2][2];  // by Operand of a and of b
  WidenFn widen;            // nullptr when value == acc (a plain copy)
  FinishFn finish;          // nullptr when it is the identity
  SumRowsFn sum_rows;       // nullptr: combine and finish are all there is
  ScaleFn scale;            // PREMUL_SUM only, else nullptr: each rank scales its input first
};

// Instruction sets, best last. `baseline` is what the compiler targets without flags.
enum class Isa : int { baseline, avx2, avx512, kCount };
std::string_view name_of(Isa isa);

// What this CPU (and kernel) can run, among what was compiled in.
bool isa_available(Isa isa);
Isa best_isa();

// nullptr when the operation is not defined for the type, or `isa` cannot run here.
const ReduceKernels* find_reduce_kernels(DType dtype, ReduceOp op, Isa isa);

// Why `op` is not defined for `dtype`, as a sentence without a full stop; empty when it is.
std::string why_not_reducible(DType dtype, ReduceOp op);

}  // namespace pycoll
