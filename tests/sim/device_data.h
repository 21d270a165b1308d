// Vectors of a test, what is in them, and what must come out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/reduce.h"

namespace pycoll::sim::tests {

using Bytes = std::vector<std::byte>;

// Memory of exactly `bytes`, `offset` bytes behind a multiple of 16, so that AddressSanitizer sees
// every step beyond either end but the first few before it.
class Buffer {
 public:
  explicit Buffer(size_t bytes, size_t offset = 0);
  std::byte* data() const { return memory_.get() + offset_; }
  size_t size() const { return bytes_; }
  void fill(const Bytes& contents);
  void poison();  // as it was at first
  Bytes contents() const { return {data(), data() + bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte[], Free> memory_;
  size_t offset_;
  size_t bytes_;
};

// How contents are made. `exact`: sums and products of up to 16 of them are exact in an
// accumulator, so they do not depend on their order; `any`: all bits, NaN and infinities among
// them, but no two NaNs where results keep the payload of the first.
enum class Contents { exact, any };

Bytes make_contents(DType dtype, ReduceOp op, uint64_t count, uint64_t seed, Contents kind);

// Of all vectors in the order given, by the CPU's kernels: combined in that order, then finished.
Bytes fold(DType dtype, ReduceOp op, const std::vector<Bytes>& vectors);

// nullptr or what differs, in words.
std::string difference(DType dtype, const Bytes& got, const Bytes& expected);

}  // namespace pycoll::sim::tests
