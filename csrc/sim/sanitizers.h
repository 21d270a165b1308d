// What the executor says to ThreadSanitizer and AddressSanitizer. They are in the program that uses
// the executor or not at all, so one build of it serves all.
//
// The executor is a shared library for that reason: in one binary with instrumented code the linker
// would be free to take that code's copies of std::vector and the like, and every access of the
// executor to its own tables would be a kernel's. It must not use std::mutex or pthreads either,
// whose locks order all fibers in ThreadSanitizer's eyes and so hide races.
#pragma once

#include <cstddef>

#define PYCOLL_SIM_WEAK extern "C" __attribute__((weak))
PYCOLL_SIM_WEAK void __tsan_acquire(void* address);
PYCOLL_SIM_WEAK void __tsan_release(void* address);
PYCOLL_SIM_WEAK void* __tsan_get_current_fiber(void);
PYCOLL_SIM_WEAK void* __tsan_create_fiber(unsigned flags);
PYCOLL_SIM_WEAK void __tsan_destroy_fiber(void* fiber);
PYCOLL_SIM_WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
PYCOLL_SIM_WEAK void AnnotateIgnoreReadsBegin(const char* file, int line);
PYCOLL_SIM_WEAK void AnnotateIgnoreReadsEnd(const char* file, int line);
PYCOLL_SIM_WEAK void AnnotateIgnoreWritesBegin(const char* file, int line);
PYCOLL_SIM_WEAK void AnnotateIgnoreWritesEnd(const char* file, int line);
PYCOLL_SIM_WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack,
                                                    size_t size);
PYCOLL_SIM_WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** old_stack,
                                                     size_t* old_size);
PYCOLL_SIM_WEAK void __asan_unpoison_memory_region(const volatile void* address, size_t size);
#undef PYCOLL_SIM_WEAK

namespace pycoll::sim {

inline bool under_tsan() {
  return __tsan_acquire != nullptr;
}

// Switching must not order the fibers.
inline constexpr unsigned kNoOrder = 1;

inline void tsan_acquire(const void* address) {
  if (under_tsan()) __tsan_acquire(const_cast<void*>(address));
}
inline void tsan_release(const void* address) {
  if (under_tsan()) __tsan_release(const_cast<void*>(address));
}

// While it lives, allocations and copies of the calling thread are none that ThreadSanitizer looks
// at.
class Quiet {
 public:
  Quiet() {
    if (!under_tsan()) return;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Quiet() {
    if (!under_tsan()) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Quiet(const Quiet&) = delete;
};

}  // namespace pycoll::sim
