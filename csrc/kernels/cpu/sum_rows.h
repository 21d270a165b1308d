// Sums of several vectors in one pass, stored to several places.
//
// A term that is also a target (in place, in memory that several CPUs use) is loaded and stored in
// the same breath: its cache line comes over once, to be written, and not once to be read and again
// to be owned. That is worth a factor of almost two where vectors lie in the peers' caches.
#pragma once

#include "kernels/cpu/reduce_loops.h"

namespace pycoll {
namespace {

// Four vectors of T that follow each other, in registers: with an array of them gcc 12 goes
// through the stack.
template <typename T>
struct Registers {
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  typedef T Anywhere __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
  static constexpr size_t kElements = 4 * kVectorBytes / sizeof(T);
  Vector a, b, c, d;

  PYCOLL_HD static Registers load(const std::byte* from) {
    const auto* at = reinterpret_cast<const Anywhere*>(from);
    Registers loaded{at[0], at[1], at[2], at[3]};
    hold(loaded.a);
    hold(loaded.b);
    hold(loaded.c);
    hold(loaded.d);
    return loaded;
  }
  // Else gcc makes load and sum one instruction with AVX-512, masked by whether the other operand
  // is NaN: then one cache miss waits for the other.
  PYCOLL_HD static void hold([[maybe_unused]] Vector& x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#endif
  }
  PYCOLL_HD void store(std::byte* to) const {
    auto* at = reinterpret_cast<Anywhere*>(to);
    at[0] = a;
    at[1] = b;
    at[2] = c;
    at[3] = d;
  }
  template <typename Op>
  PYCOLL_HD void combine(const Registers& next, Op op) {
    a = op(a, next.a);
    b = op(b, next.b);
    c = op(c, next.c);
    d = op(d, next.d);
  }
  PYCOLL_HD void divide(T divisor) {
    a /= divisor;
    b /= divisor;
    c /= divisor;
    d /= divisor;
  }
};

template <typename T, typename Op, bool kDivide>
PYCOLL_LOOP void sum_rows(const SumRows& rows, size_t begin, size_t end, int world_size) {
  using Block = Registers<T>;
  const T divisor = static_cast<T>(world_size);
  const std::byte* const first = rows.terms[0];
  std::byte* const target = rows.targets[0];
  size_t i = begin;
  for (; i + Block::kElements <= end; i += Block::kElements) {
    const size_t offset = i * sizeof(T);
    Block sum = Block::load(first + offset);
    for (size_t term = 1; term < rows.term_count; ++term) {
      sum.combine(Block::load(rows.terms[term] + offset), Op{});
    }
    if constexpr (kDivide) sum.divide(divisor);
    sum.store(target + offset);
    for (size_t j = 1; j < rows.target_count; ++j) sum.store(rows.targets[j] + offset);
  }
  for (; i < end; ++i) {
    T sum = load<T>(rows.terms[0], i);
    for (size_t term = 1; term < rows.term_count; ++term) {
      sum = Op{}(sum, load<T>(rows.terms[term], i));
    }
    if constexpr (kDivide) sum /= divisor;
    for (size_t j = 0; j < rows.target_count; ++j) store<T>(rows.targets[j], i, sum);
  }
}

}  // namespace
}  // namespace pycoll
