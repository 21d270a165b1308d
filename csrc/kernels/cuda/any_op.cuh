// Any element type under any reduce operation, by switches at run time: one kernel instead of a
// hundred. Each element is 64 bits in a register, and each thread takes one at a time. The rules
// are those of kernels/element.h, which does the arithmetic here too.
#pragma once

#include "kernels/cuda/any_op.h"
#include "kernels/cuda/float_sum.cuh"
#include "kernels/element.h"

namespace pycoll::cuda {

PYCOLL_DEVICE uint64_t load_element(Format format, const void* base, uint64_t i) {
  switch (format) {
    case Format::u8:
      return static_cast<const uint8_t*>(base)[i];
    case Format::u16:
      return static_cast<const uint16_t*>(base)[i];
    case Format::u32:
      return static_cast<const uint32_t*>(base)[i];
    case Format::s8:
      return static_cast<uint64_t>(int64_t{static_cast<const int8_t*>(base)[i]});
    case Format::s16:
      return static_cast<uint64_t>(int64_t{static_cast<const int16_t*>(base)[i]});
    case Format::s32:
      return static_cast<uint64_t>(int64_t{static_cast<const int32_t*>(base)[i]});
    case Format::u64:
    case Format::s64:
      break;
  }
  return static_cast<const uint64_t*>(base)[i];
}

PYCOLL_DEVICE void store_element(Format format, void* base, uint64_t i, uint64_t bits) {
  switch (format) {
    case Format::u8:
    case Format::s8:
      static_cast<uint8_t*>(base)[i] = static_cast<uint8_t>(bits);
      break;
    case Format::u16:
    case Format::s16:
      static_cast<uint16_t*>(base)[i] = static_cast<uint16_t>(bits);
      break;
    case Format::u32:
    case Format::s32:
      static_cast<uint32_t*>(base)[i] = static_cast<uint32_t>(bits);
      break;
    case Format::u64:
    case Format::s64:
      static_cast<uint64_t*>(base)[i] = bits;
      break;
  }
}

PYCOLL_DEVICE float float32_of(uint64_t bits) {
  return element::bits_as<float>(static_cast<uint32_t>(bits));
}
PYCOLL_DEVICE uint64_t bits_of(float x) {
  return element::bits_as<uint32_t>(x);
}
PYCOLL_DEVICE double float64_of(uint64_t bits) {
  return element::bits_as<double>(bits);
}
PYCOLL_DEVICE uint64_t bits_of(double x) {
  return element::bits_as<uint64_t>(x);
}

PYCOLL_DEVICE uint64_t widen(Conversion conversion, uint64_t bits) {
  switch (conversion) {
    case Conversion::float16:
      return bits_of(element::to_float32(element::Float16{static_cast<uint16_t>(bits)}));
    case Conversion::bfloat16:
      return bits_of(element::to_float32(element::BFloat16{static_cast<uint16_t>(bits)}));
    case Conversion::float8_e4m3:
      return bits_of(element::to_float32(element::Float8E4M3{static_cast<uint8_t>(bits)}));
    case Conversion::float8_e5m2:
      return bits_of(element::to_float32(element::Float8E5M2{static_cast<uint8_t>(bits)}));
    case Conversion::none:
      break;
  }
  return bits;
}

PYCOLL_DEVICE uint64_t narrow(Conversion conversion, uint64_t bits) {
  const float x = float32_of(bits);
  switch (conversion) {
    case Conversion::float16:
      return element::round_to<element::Float16>(x).bits;
    case Conversion::bfloat16:
      return element::round_to<element::BFloat16>(x).bits;
    case Conversion::float8_e4m3:
      return element::round_to<element::Float8E4M3>(x).bits;
    case Conversion::float8_e5m2:
      return element::round_to<element::Float8E5M2>(x).bits;
    case Conversion::none:
      break;
  }
  return bits;
}

PYCOLL_DEVICE uint64_t divide(Division division, uint64_t bits, int32_t by) {
  switch (division) {
    case Division::signed_integer:
      return static_cast<uint64_t>(static_cast<int64_t>(bits) / by);
    case Division::unsigned_integer:
      return bits / static_cast<uint64_t>(by);
    case Division::float32:
      return bits_of(element::Divide<float>(by)(float32_of(bits)));
    case Division::float64:
      return bits_of(element::Divide<double>(by)(float64_of(bits)));
    case Division::none:
      break;
  }
  return bits;
}

// element::select_float for a format that is known at run time. Returns an operand unchanged: the
// first NaN, else the lesser or greater one.
PYCOLL_DEVICE uint64_t select(const AnyOp& op, uint64_t a, uint64_t b) {
  const auto x = static_cast<int64_t>(a), y = static_cast<int64_t>(b);
  const int64_t x_key = x ^ ((x >> 63) & op.magnitude), y_key = y ^ ((y >> 63) & op.magnitude);
  const bool x_nan = (x & op.magnitude) > op.infinity, y_nan = (y & op.magnitude) > op.infinity;
  const bool x_first = op.combine == Combine::lesser ? x_key <= y_key : x_key >= y_key;
  return x_nan || (x_first && !y_nan) ? a : b;
}

PYCOLL_DEVICE uint64_t combine_bits(const AnyOp& op, uint64_t a, uint64_t b) {
  using element::Product;
  using element::Sum;
  switch (op.combine) {
    case Combine::add:
      return a + b;
    case Combine::multiply:
      return a * b;
    case Combine::add_float32:
      return bits_of(Sum{}(float32_of(a), float32_of(b)));
    case Combine::multiply_float32:
      return bits_of(Product{}(float32_of(a), float32_of(b)));
    case Combine::add_float64:
      return bits_of(Sum{}(float64_of(a), float64_of(b)));
    case Combine::multiply_float64:
      return bits_of(Product{}(float64_of(a), float64_of(b)));
    case Combine::lesser:
    case Combine::greater:
      return select(op, a, b);
    case Combine::lesser_unsigned:
      return b < a ? b : a;
    case Combine::greater_unsigned:
      return a < b ? b : a;
    case Combine::bit_and:
      return a & b;
    case Combine::bit_or:
      return a | b;
    case Combine::bit_xor:
      return a ^ b;
    case Combine::all:
      return a != 0 && b != 0 ? 1 : 0;
    case Combine::any:
      return (a | b) != 0 ? 1 : 0;
    case Combine::odd:
      return (a != 0) != (b != 0) ? 1 : 0;
  }
  return a;
}

// The interface of FloatSum (float_sum.cuh).
class AnyOpArithmetic {
 public:
  using Parameters = AnyOp;
  explicit PYCOLL_DEVICE AnyOpArithmetic(const AnyOp& op) : op_(op) {}

  PYCOLL_DEVICE uint64_t value_size() const { return op_.value_bytes; }
  PYCOLL_DEVICE uint64_t acc_size() const { return op_.acc_bytes; }

  PYCOLL_DEVICE void combine(const Team& team, const Combination& c, uint64_t count) const {
    for_each<1>(team, count, [&](auto, uint64_t i, uint64_t) {
      const uint64_t received = load(c.received, i), own = load(c.own, i);
      const uint64_t result =
          c.received_first ? combine_bits(op_, received, own) : combine_bits(op_, own, received);
      store(c.stored, i, result);
      store(c.sent, i, result);
    });
  }

  PYCOLL_DEVICE void convert(const Team& team, const Operand& src, const Target& dst,
                             uint64_t count) const {
    for_each<1>(team, count, [&](auto, uint64_t i, uint64_t) { store(dst, i, load(src, i)); });
  }

  template <class Terms, class Targets>
  PYCOLL_DEVICE void sum(const Team& team, const Terms& terms, const Targets& targets,
                         uint64_t count, bool /*aligned*/) const {
    for_each<1>(team, count, [&](auto, uint64_t i, uint64_t) {
      uint64_t total = 0;
      terms.for_each([&](bool begins, const void* term) {
        const uint64_t x = load({term, false}, i);
        total = begins ? x : combine_bits(op_, total, x);
      });
      targets.for_each([&](void* target) { store({target, false}, i, total); });
    });
  }

  PYCOLL_DEVICE uint64_t load(const Operand& from, uint64_t i) const {
    if (from.acc) return load_element(op_.acc, from.data, i);
    return widen(op_.conversion, load_element(op_.value, from.data, i));
  }
  PYCOLL_DEVICE void store(const Target& to, uint64_t i, uint64_t bits) const {
    if (to.data == nullptr) return;
    if (to.acc) return store_element(op_.acc, to.data, i, bits);
    bits = divide(op_.division, bits, op_.world_size);
    store_element(op_.value, to.data, i, narrow(op_.conversion, bits));
  }

 private:
  const AnyOp& op_;
};

}  // namespace pycoll::cuda
