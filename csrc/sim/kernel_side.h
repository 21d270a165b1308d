// What kernels call while the executor runs them: device/on_simulator.cuh gives these CUDA's names.
//
// Each function that waits takes the place in the kernel's source, for reports. All of it is
// compiled without sanitizers, whatever the kernels are compiled with.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "device/scope.h"

namespace pycoll::sim {

struct Place {
  const char* file = nullptr;
  int line = 0;
  // As a default argument: where the function was called.
  static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Place& other) const;
};

// Of the CUDA thread that runs; the executor sets them when it switches. Meaningless on the host.
// initial-exec: they are read often, and a library that is loaded late finds room for 48 bytes.
#define PYCOLL_SIM_THREAD_LOCAL \
  extern constinit thread_local __attribute__((tls_model("initial-exec")))
PYCOLL_SIM_THREAD_LOCAL uint3 threadIdx;
PYCOLL_SIM_THREAD_LOCAL uint3 blockIdx;
PYCOLL_SIM_THREAD_LOCAL dim3 blockDim;
PYCOLL_SIM_THREAD_LOCAL dim3 gridDim;
#undef PYCOLL_SIM_THREAD_LOCAL

int lane();  // of the thread in its warp: 0..31

// A barrier of all threads of the block. Threads at different places in the source, or one that has
// exited, are reported as divergence: hardware may hang there.
void sync_threads(Place at);

// Operations of the lanes in `mask`. All of them must come to the same place with the same mask,
// else it is reported. Only sync_warp orders memory.
void sync_warp(unsigned mask, Place at);
// The bits that `source` brought; rubbish, as on hardware, if that lane is not in the mask.
uint64_t shuffle(unsigned mask, uint64_t bits, int source, Place at);
unsigned ballot(unsigned mask, bool predicate, Place at);

// Lets others run. A thread that has not called this since something changed is not waiting.
void spin_pause(Place at = Place::here());

uint64_t timer_ns();

// The block's array of that name (any address); made and filled with 0xff bytes by the first who
// asks.
void* shared_array(const void* name, size_t bytes, size_t alignment);
void* dynamic_shared();

// Reports a vector access at an address that is not a multiple of `alignment`.
[[noreturn]] void misaligned(const void* address, size_t alignment, Place at);

enum class Access : uint8_t {
  load_relaxed,
  load_acquire,
  store_relaxed,
  store_release,
  update_relaxed,
  update_acq_rel,
};

// Stands around one atomic access. It is where threads may be switched, it orders the access on the
// CPU we run on, and it tells ThreadSanitizer what CUDA's memory model promises: an acquire that
// reads what a release wrote comes after it if each one's scope includes the other. Relaxed
// accesses promise nothing, and a relaxed store ends the release sequence of the one before.
//
// Host threads may use it too; they are outside every device, so only system scope reaches them.
// What kernels release with system scope is also visible to acquire loads of std::atomic on the
// host.
class AtomicAccess {
 public:
  struct What {
    const void* address;
    size_t size;
    device::Scope scope;
    Access access;
    Place at;
  };
  explicit AtomicAccess(const What& what);
  ~AtomicAccess();
  AtomicAccess(const AtomicAccess&) = delete;

 private:
  const What what_;
};

}  // namespace pycoll::sim
