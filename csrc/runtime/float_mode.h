// The floating-point mode of the thread that computes a reduction.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <cstdint>

namespace pycoll {

// While it lives, sums are IEEE: round to nearest, subnormals kept. A collective runs in the
// caller's thread or in one that inherited a caller's mode, and a caller may have switched to
// flush-to-zero (torch.set_flush_denormal). If one rank alone did, ranks that compute the same sum
// would end with different bits.
class IeeeFloatMode {
 public:
  IeeeFloatMode() : saved_(get()) {
    if (differs(saved_)) set(kDefault);
  }
  ~IeeeFloatMode() {
    if (differs(saved_)) set(saved_);
  }
  IeeeFloatMode(const IeeeFloatMode&) = delete;
  IeeeFloatMode& operator=(const IeeeFloatMode&) = delete;

 private:
#if defined(__SSE__)
  using Word = uint32_t;  // MXCSR
  static constexpr Word kDefault = 0x1f80;
  static constexpr Word kFlags = 0x3f;  // sticky exceptions: not a mode
  static Word get() {
    return _mm_getcsr();
  }
  static void set(Word word) {
    _mm_setcsr(word);
  }
#elif defined(__aarch64__)
  using Word = uint64_t;  // FPCR
  static constexpr Word kDefault = 0;
  static constexpr Word kFlags = 0;
  static Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(Word word) {
    asm volatile("msr fpcr, %0" : : "r"(word));
  }
#else
  using Word = uint32_t;
  static constexpr Word kDefault = 0;
  static constexpr Word kFlags = 0;
  static Word get() {
    return kDefault;
  }
  static void set(Word) {}
#endif
  static bool differs(Word word) {
    return (word & ~kFlags) != kDefault;
  }

  const Word saved_;
};

}  // namespace pycoll
