// SUM and AVG of float32, float16 and bfloat16, in float32: the arithmetic that training does all
// the time, sixteen bytes of values at a time. The other types and operations are in any_op.cuh;
// both have the same interface, which executor.cuh is written over.
#pragma once

#include "kernels/cuda/loops.cuh"

namespace pycoll::cuda {

// One slice of a step. A form says what memory holds: values, or accumulators (partial sums).
struct Operand {
  const void* data;
  bool acc;
};
struct Target {
  void* data;  // nullptr: none
  bool acc;
};

// dst and sent <- received (+) own.
struct Combination {
  Operand received;
  Operand own;
  Target stored;
  Target sent;
  bool received_first;
};

template <class T>
class FloatSum {
 public:
  using Value = T;
  static constexpr int kPack = 16 / sizeof(T);  // values
  // 64 bytes of accumulators of one operand are under way in each thread.
  static constexpr int kUnroll = static_cast<int>(sizeof(T));

  struct Parameters {
    float divisor;  // of AVG; 0: SUM
  };
  explicit PYCOLL_DEVICE FloatSum(const Parameters& parameters) : divisor_(parameters.divisor) {}

  static PYCOLL_DEVICE uint64_t value_size() { return sizeof(T); }
  static PYCOLL_DEVICE uint64_t acc_size() { return sizeof(float); }

  PYCOLL_DEVICE void combine(const Team& team, const Combination& c, uint64_t count) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      combine_forms<false, false>(team, c, count);
    } else {
      if (c.received.acc) {
        c.own.acc ? combine_forms<true, true>(team, c, count)
                  : combine_forms<true, false>(team, c, count);
      } else {
        c.own.acc ? combine_forms<false, true>(team, c, count)
                  : combine_forms<false, false>(team, c, count);
      }
    }
  }

  // A value becomes an accumulator, or an accumulator a (finished) value.
  PYCOLL_DEVICE void convert(const Team& team, const Operand& src, const Target& dst,
                             uint64_t count) const {
    if (src.acc) {
      convert_form<true>(team, src.data, dst, count);
    } else {
      convert_form<false>(team, src.data, dst, count);
    }
  }

  // to(target, i) <- the sum over members, ascending, of values term(member), for each of `targets`
  // targets. Pointers to element 0 of the range; `aligned`: all of them to 16 bytes.
  template <class Terms, class Targets>
  PYCOLL_DEVICE void sum(const Team& team, const Terms& terms, const Targets& targets,
                         uint64_t count, bool aligned) const {
    uint64_t done = 0;
    if (aligned) {
      const uint64_t packs = count / kPack;
      for_each<kUnroll>(team, packs, [&](auto batch, uint64_t first, uint64_t stride) {
        sum_packs<decltype(batch)::kSize>(terms, targets, first, stride);
      });
      done = packs * kPack;
    }
    for_each<1>(team, count - done, [&](auto, uint64_t first, uint64_t) {
      const uint64_t i = done + first;
      float total = 0;
      terms.for_each([&](bool begins, const void* term) {
        const float x = device::to_float(static_cast<const T*>(term)[i]);
        total = begins ? x : total + x;
      });
      const T value = finish(total);
      targets.for_each([&](void* target) { static_cast<T*>(target)[i] = value; });
    });
  }

  PYCOLL_DEVICE T finish(float sum) const {
    return device::from_float<T>(divisor_ != 0 ? sum / divisor_ : sum);
  }

 private:
  // ---- A pack of values, or the accumulators of as many. ----

  template <bool kAcc>
  static PYCOLL_DEVICE void load(const void* base, uint64_t pack, float (&x)[kPack]) {
    if constexpr (kAcc) {
#pragma unroll
      for (int part = 0; part < kPack / 4; ++part) {
        const auto four =
            device::load_pack(static_cast<const float*>(base) + pack * kPack + part * 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) x[part * 4 + k] = four.v[k];
      }
    } else {
      const auto values = device::load_pack(static_cast<const T*>(base) + pack * kPack);
#pragma unroll
      for (int k = 0; k < kPack; ++k) x[k] = device::to_float(values.v[k]);
    }
  }

  static PYCOLL_DEVICE void store_accs(void* base, uint64_t pack, const float (&x)[kPack]) {
#pragma unroll
    for (int part = 0; part < kPack / 4; ++part) {
      device::Pack<float> four;
#pragma unroll
      for (int k = 0; k < 4; ++k) four.v[k] = x[part * 4 + k];
      device::store_pack(static_cast<float*>(base) + pack * kPack + part * 4, four);
    }
  }

  PYCOLL_DEVICE device::Pack<T> finish_pack(const float (&x)[kPack]) const {
    device::Pack<T> values;
#pragma unroll
    for (int k = 0; k < kPack; ++k) values.v[k] = finish(x[k]);
    return values;
  }

  static PYCOLL_DEVICE void store_values(void* base, uint64_t pack, const device::Pack<T>& values) {
    device::store_pack(static_cast<T*>(base) + pack * kPack, values);
  }

  PYCOLL_DEVICE void store(const Target& target, uint64_t pack, const float (&x)[kPack]) const {
    if (target.data == nullptr) return;
    if (target.acc) {
      store_accs(target.data, pack, x);
    } else {
      store_values(target.data, pack, finish_pack(x));
    }
  }

  // ---- One element. ----

  template <bool kAcc>
  static PYCOLL_DEVICE float load_one(const void* base, uint64_t i) {
    if constexpr (kAcc) {
      return static_cast<const float*>(base)[i];
    } else {
      return device::to_float(static_cast<const T*>(base)[i]);
    }
  }
  PYCOLL_DEVICE void store_one(const Target& target, uint64_t i, float x) const {
    if (target.data == nullptr) return;
    if (target.acc) {
      static_cast<float*>(target.data)[i] = x;
    } else {
      static_cast<T*>(target.data)[i] = finish(x);
    }
  }

  // ---- Loops. ----

  // Addition of floats commutes but for the payload of NaNs, so the order of operands does not
  // matter here.
  template <bool kReceivedAcc, bool kOwnAcc>
  PYCOLL_DEVICE void combine_forms(const Team& team, const Combination& c, uint64_t count) const {
    const uint32_t bits = low_bits(c.received.data) | low_bits(c.own.data) |
                          low_bits(c.stored.data) | low_bits(c.sent.data);
    const uint64_t packs = bits == 0 ? count / kPack : 0;
    for_each<kUnroll>(team, packs, [&](auto batch, uint64_t first, uint64_t stride) {
      constexpr int kSize = decltype(batch)::kSize;
      float x[kSize][kPack], y[kSize][kPack];
#pragma unroll
      for (int u = 0; u < kSize; ++u) load<kReceivedAcc>(c.received.data, first + u * stride, x[u]);
#pragma unroll
      for (int u = 0; u < kSize; ++u) load<kOwnAcc>(c.own.data, first + u * stride, y[u]);
#pragma unroll
      for (int u = 0; u < kSize; ++u) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) x[u][k] += y[u][k];
        store(c.stored, first + u * stride, x[u]);
        store(c.sent, first + u * stride, x[u]);
      }
    });
    const uint64_t done = packs * kPack;
    for_each<1>(team, count - done, [&](auto, uint64_t first, uint64_t) {
      const uint64_t i = done + first;
      const float x = load_one<kReceivedAcc>(c.received.data, i) + load_one<kOwnAcc>(c.own.data, i);
      store_one(c.stored, i, x);
      store_one(c.sent, i, x);
    });
  }

  template <bool kFromAcc>
  PYCOLL_DEVICE void convert_form(const Team& team, const void* src, const Target& dst,
                                  uint64_t count) const {
    const uint64_t packs = (low_bits(src) | low_bits(dst.data)) == 0 ? count / kPack : 0;
    for_each<kUnroll>(team, packs, [&](auto batch, uint64_t first, uint64_t stride) {
      constexpr int kSize = decltype(batch)::kSize;
      float x[kSize][kPack];
#pragma unroll
      for (int u = 0; u < kSize; ++u) load<kFromAcc>(src, first + u * stride, x[u]);
#pragma unroll
      for (int u = 0; u < kSize; ++u) store(dst, first + u * stride, x[u]);
    });
    const uint64_t done = packs * kPack;
    for_each<1>(team, count - done, [&](auto, uint64_t first, uint64_t) {
      store_one(dst, done + first, load_one<kFromAcc>(src, done + first));
    });
  }

  template <int kSize, class Terms, class Targets>
  PYCOLL_DEVICE void sum_packs(const Terms& terms, const Targets& targets, uint64_t first,
                               uint64_t stride) const {
    float total[kSize][kPack] = {};
    terms.for_each([&](bool begins, const void* term) {
      float x[kSize][kPack];
#pragma unroll
      for (int u = 0; u < kSize; ++u) load<false>(term, first + u * stride, x[u]);
#pragma unroll
      for (int u = 0; u < kSize; ++u) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) total[u][k] = begins ? x[u][k] : total[u][k] + x[u][k];
      }
    });
#pragma unroll
    for (int u = 0; u < kSize; ++u) {
      const device::Pack<T> values = finish_pack(total[u]);
      targets.for_each([&](void* target) { store_values(target, first + u * stride, values); });
    }
  }

  float divisor_;
};

}  // namespace pycoll::cuda
