// memcpy and memset, in all their forms.
#include <cstring>
#include <vector>

#include "sim/cuda/runtime.h"

namespace pycoll::sim::cuda {
namespace {

enum class Where : uint8_t { pageable, pinned, device };

struct Side {
  Where where = Where::pageable;
  int device = 0;
  bool valid = true;
};

// What a range of memory is. Invalid: it leaves its allocation, or runs into one.
Side side_of(Runtime& runtime, const void* base, size_t bytes) {
  const Allocation* found = runtime.memory.find(base);
  if (found == nullptr) return {.valid = !runtime.memory.overlaps(base, bytes)};
  const size_t offset = static_cast<const std::byte*>(base) - found->base;
  Side side;
  side.where = found->on_device() ? Where::device : Where::pinned;
  side.device = found->device;
  side.valid = !found->freed && bytes <= found->bytes - offset;
  return side;
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  cudaMemcpyKind kind;
};

// CUDA finds out by itself where memory is, and refuses what is said wrongly.
bool kind_fits(cudaMemcpyKind kind, const Side& to, const Side& from) {
  const bool to_device = to.where == Where::device, from_device = from.where == Where::device;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

void count_staged(const Call& call, const Side& to, const Side& from) {
  Runtime& runtime = call.runtime;
  if (to.where != Where::device || from.where != Where::device || to.device == from.device) return;
  if (runtime.devices[to.device].enabled_peers.contains(from.device)) return;
  if (runtime.devices[from.device].enabled_peers.contains(to.device)) return;
  ++runtime.counters.staged_peer_copies;
}

// By a name that ThreadSanitizer's reports have: what a peer may be writing is read so, and checked
// afterwards (tests/sim/tsan_suppressions.txt).
[[gnu::noinline]] void copy_beside_pinned(const Copy& what) {
  std::memcpy(what.to, what.from, what.bytes);
  asm volatile("");  // no tail call, which would not be in a report
}

// Copies from pageable memory read it before they return, those to it return when they have written
// it, and without a device in it nothing is asynchronous: so says CUDA's "API synchronization
// behavior". Code that may rely on more may not rely on it here.
cudaError_t copy(const Call& call, const Copy& what, cudaStream_t on, bool blocking) {
  Runtime& runtime = call.runtime;
  const auto stream = runtime.stream(on, call.thread);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (what.kind < cudaMemcpyHostToHost || what.kind > cudaMemcpyDefault) {
    return cudaErrorInvalidMemcpyDirection;
  }
  if (what.bytes == 0) return cudaSuccess;
  const Side to = side_of(runtime, what.to, what.bytes);
  const Side from = side_of(runtime, what.from, what.bytes);
  if (!to.valid || !from.valid || !kind_fits(what.kind, to, from)) return cudaErrorInvalidValue;
  const bool pageable = to.where == Where::pageable || from.where == Where::pageable;
  if (stream->capture != nullptr && pageable) {
    runtime.invalidate(*stream->capture);
    return cudaErrorStreamCaptureUnsupported;
  }
  count_staged(call, to, from);
  Plan plan;
  plan.kind = Kind::memory;
  const bool hosts = to.where != Where::device && from.where != Where::device;
  if (from.where == Where::pageable && !hosts) {
    auto staging = std::make_shared<std::vector<std::byte>>(what.bytes);
    {
      const Loud loud;
      std::memcpy(staging->data(), what.from, what.bytes);
    }
    plan.work = [what, staging] { std::memcpy(what.to, staging->data(), what.bytes); };
  } else if (to.where == Where::pinned || from.where == Where::pinned) {
    plan.work = [what] { copy_beside_pinned(what); };
  } else {
    plan.work = [what] { std::memcpy(what.to, what.from, what.bytes); };
  }
  TaskPtr posted;
  if (const cudaError_t error = runtime.submit(*stream, std::move(plan), &posted)) return error;
  if (posted != nullptr && (blocking || hosts || to.where == Where::pageable)) {
    return runtime.wait_for(call.lock, {posted}, stream->device);
  }
  return cudaSuccess;
}

cudaError_t fill(const Call& call, void* to, int value, size_t bytes, cudaStream_t on) {
  Runtime& runtime = call.runtime;
  const auto stream = runtime.stream(on, call.thread);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  const Side side = side_of(runtime, to, bytes);
  if (!side.valid || side.where == Where::pageable) return cudaErrorInvalidValue;
  Plan plan;
  plan.kind = Kind::memory;
  plan.work = [=] { std::memset(to, value, bytes); };
  return runtime.submit(*stream, std::move(plan));
}

// The legacy stream, and the caller waits: refused while a capture is under way that could not
// bear it.
cudaError_t copy_now(const Call& call, const Copy& what) {
  if (const cudaError_t error = call.runtime.refuse_implicit(*call.device().legacy)) return error;
  if (const cudaError_t error = call.runtime.refuse_unsafe(call.thread)) return error;
  return copy(call, what, cudaStreamLegacy, true);
}

// Between devices that are named. Needs no peer access.
cudaError_t check_peers(const Call& call, const Copy& what, int to_device, int from_device) {
  Runtime& runtime = call.runtime;
  if (!runtime.is_device(to_device) || !runtime.is_device(from_device)) {
    return cudaErrorInvalidDevice;
  }
  const Side to = side_of(runtime, what.to, what.bytes);
  const Side from = side_of(runtime, what.from, what.bytes);
  const bool right = to.where == Where::device && to.device == to_device &&
                     from.where == Where::device && from.device == from_device;
  return right ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    return copy_now(call, {to, from, bytes, kind});
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    return copy(call, {to, from, bytes, kind}, stream, false);
  });
}

cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from, int from_device,
                           size_t bytes) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const Copy what{to, from, bytes, cudaMemcpyDeviceToDevice};
    if (const cudaError_t error = check_peers(call, what, to_device, from_device)) return error;
    return copy_now(call, what);
  });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device,
                                size_t bytes, cudaStream_t stream) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const Copy what{to, from, bytes, cudaMemcpyDeviceToDevice};
    if (const cudaError_t error = check_peers(call, what, to_device, from_device)) return error;
    return copy(call, what, stream, false);
  });
}

// Does not wait, for memory of a device.
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return fill(call, to, value, bytes, cudaStreamLegacy); });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return fill(call, to, value, bytes, stream); });
}
