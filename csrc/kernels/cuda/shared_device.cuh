// Kernels for ranks that share a GPU: they read all and write all that a rank is to do, and never
// wait. Also what is elementwise.
#pragma once

#include "kernels/cuda/any_op.cuh"
#include "kernels/cuda/caster.cuh"
#include "kernels/cuda/executor_arguments.h"

namespace pycoll::cuda {

template <class Parameters>
struct ReduceManyArguments {
  ReduceManyCall call;  // in the kernel's elements
  Parameters arithmetic;
};

template <class Parameters>
struct Sources {
  const ReduceManyArguments<Parameters>& in;
  uint64_t offset;  // bytes
  template <class Body>
  PYCOLL_DEVICE void for_each(const Body& body) const {
    for (int32_t i = 0; i < in.call.sources; ++i) {
      body(i == 0, static_cast<const std::byte*>(in.call.input[i]) + offset);
    }
  }
};
template <class Parameters>
struct Destinations {
  const ReduceManyArguments<Parameters>& in;
  uint64_t offset;
  template <class Body>
  PYCOLL_DEVICE void for_each(const Body& body) const {
    for (int32_t i = 0; i < in.call.targets; ++i) {
      body(static_cast<std::byte*>(in.call.output[i]) + offset);
    }
  }
};

template <class Arithmetic>
__global__ void __launch_bounds__(kMaxThreads, 1) reduce_many_kernel(
    PYCOLL_GRID_CONSTANT ReduceManyArguments<typename Arithmetic::Parameters> in) {
  using Parameters = typename Arithmetic::Parameters;
  const Arithmetic arithmetic(in.arithmetic);
  const uint64_t offset = in.call.begin * arithmetic.value_size();
  uint32_t bits = static_cast<uint32_t>(offset) & 15;
  for (int32_t i = 0; i < in.call.sources; ++i) bits |= low_bits(in.call.input[i]);
  for (int32_t i = 0; i < in.call.targets; ++i) bits |= low_bits(in.call.output[i]);
  arithmetic.sum(grid_team(), Sources<Parameters>{in, offset}, Destinations<Parameters>{in, offset},
                 in.call.end - in.call.begin, bits == 0);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    copy_many_kernel(PYCOLL_GRID_CONSTANT CopyManyCall in) {
  for (int32_t i = 0; i < in.copies; ++i) {
    if (in.src[i] == in.dst[i]) continue;
    copy_bytes(
        grid_team(),
        {static_cast<const std::byte*>(in.src[i]), static_cast<std::byte*>(in.dst[i]), nullptr},
        in.bytes[i]);
  }
}

// ---- The same, where the place of a vector lies in memory. ----

PYCOLL_DEVICE std::byte* resolve(const PeerPlace& place) {
  const uint64_t word = place.word == nullptr ? 0 : *place.word;
  if (word == 0) return place.staged;
  const uint64_t slot = (word >> 48) - 1, offset = word & ((uint64_t{1} << 48) - 1);
  return reinterpret_cast<std::byte*>(place.table[slot]) + offset + place.offset;
}

// The words of other ranks were written before the kernel began, and stay until after.
PYCOLL_DEVICE bool agrees(const Agreement& agreement) {
  for (int32_t i = 0; i < kMaxRanks; ++i) {
    const uint64_t* theirs = agreement.theirs[i];
    if (theirs == nullptr || ((*theirs ^ agreement.expected[i]) & kComparedBits) == 0) continue;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      using device::Scope;
      device::store_relaxed<Scope::system>(agreement.differs + agreement.self,
                                           agreement.expected[i]);
      device::store_release<Scope::system>(agreement.differs + i, *theirs);
    }
    return false;
  }
  return true;
}

struct PlacedSources {
  std::byte* const* at;  // in shared memory
  int32_t count;
  uint64_t offset;
  template <class Body>
  PYCOLL_DEVICE void for_each(const Body& body) const {
    for (int32_t i = 0; i < count; ++i) body(i == 0, at[i] + offset);
  }
};
struct PlacedTargets {
  std::byte* const* at;
  int32_t count;
  uint64_t offset;
  template <class Body>
  PYCOLL_DEVICE void for_each(const Body& body) const {
    for (int32_t i = 0; i < count; ++i) body(at[i] + offset);
  }
};

template <class Parameters>
struct ReducePlacesArguments {
  ReducePlacesCall call;  // in the kernel's elements
  Parameters arithmetic;
};

// Blocks have a thread for each place.
template <class Arithmetic>
__global__ void __launch_bounds__(kMaxThreads, 1) reduce_places_kernel(
    PYCOLL_GRID_CONSTANT ReducePlacesArguments<typename Arithmetic::Parameters> in) {
  if (*in.call.given_up != 0 || !agrees(in.call.agreement)) return;
  PYCOLL_SHARED(std::byte*, places, 2 * kMaxRanks);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < in.call.sources) places[thread] = resolve(in.call.input[thread]);
  const int32_t target = thread - kMaxRanks;
  if (target >= 0 && target < in.call.targets) places[thread] = resolve(in.call.output[target]);
  __syncthreads();
  const Arithmetic arithmetic(in.arithmetic);
  const uint64_t offset = in.call.begin * arithmetic.value_size();
  uint32_t bits = static_cast<uint32_t>(offset) & 15;
  for (int32_t i = 0; i < in.call.sources; ++i) bits |= low_bits(places[i]);
  for (int32_t i = 0; i < in.call.targets; ++i) bits |= low_bits(places[kMaxRanks + i]);
  arithmetic.sum(grid_team(), PlacedSources{places, in.call.sources, offset},
                 PlacedTargets{places + kMaxRanks, in.call.targets, offset},
                 in.call.end - in.call.begin, bits == 0);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    copy_places_kernel(PYCOLL_GRID_CONSTANT CopyPlacesCall in) {
  if (*in.given_up != 0 || !agrees(in.agreement)) return;
  for (int32_t i = 0; i < in.copies; ++i) {
    const std::byte* src = resolve(in.src[i]);
    if (src == in.dst[i]) continue;
    copy_bytes(grid_team(), {src, static_cast<std::byte*>(in.dst[i]), nullptr}, in.bytes[i]);
  }
}

// ---- Casts. ----

template <class From, class To>
__global__ void __launch_bounds__(kMaxThreads, 1) cast_kernel(PYCOLL_GRID_CONSTANT CastCall call) {
  Caster<From, To> caster(static_cast<const From*>(call.input), static_cast<To*>(call.output),
                          call.scale);
  caster.run(grid_team(), call.count);
  report_found_inf(caster.found_inf(), call.found_inf);
}

struct ScaleArguments {
  AnyOp op;
  const void* input;
  void* output;
  uint64_t count;
  uint64_t factor;  // bits of an accumulator
};

// PREMUL_SUM's scaling of the types that cast_kernel has not.
__global__ void __launch_bounds__(kMaxThreads, 1)
    scale_any_kernel(PYCOLL_GRID_CONSTANT ScaleArguments in) {
  const AnyOpArithmetic arithmetic(in.op);
  for_each<1>(grid_team(), in.count, [&](auto, uint64_t i, uint64_t) {
    const uint64_t x = arithmetic.load({in.input, false}, i);
    arithmetic.store({in.output, false}, i, combine_bits(in.op, x, in.factor));
  });
}

}  // namespace pycoll::cuda
