// Streams, and host functions on them.
#include <algorithm>

#include "sim/cuda/runtime.h"

namespace pycoll::sim::cuda {
namespace {

// As on recent devices: 0 is the lowest priority.
constexpr int kLeastPriority = 0, kGreatestPriority = -5;

cudaError_t create(const Call& call, cudaStream_t* stream, unsigned flags, int priority) {
  if (stream == nullptr || (flags & ~unsigned{cudaStreamNonBlocking}) != 0) {
    return cudaErrorInvalidValue;
  }
  priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  *stream = call.runtime.streams.add(call.runtime.make_stream(call.thread.device, flags, priority));
  return cudaSuccess;
}

// What the captured stream is synchronised or asked for does not exist yet.
cudaError_t refuse_captured(Runtime& runtime, Stream& stream) {
  if (stream.legacy) return runtime.refuse_implicit(stream);
  if (stream.capture == nullptr) return cudaSuccess;
  runtime.invalidate(*stream.capture);
  return cudaErrorStreamCaptureUnsupported;
}

template <class Body>
cudaError_t with_stream(const char* function, Rule rule, cudaStream_t handle, Body&& body) {
  return api(function, rule, [&](const Call& call) {
    const auto stream = call.runtime.stream(handle, call.thread);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : body(call, *stream);
  });
}

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return create(call, stream, cudaStreamDefault, 0); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return create(call, stream, flags, 0); });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return create(call, stream, flags, priority); });
}

// Returns at once; what is on the stream is still done.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const auto stream = call.runtime.streams.find(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) {
      call.runtime.invalidate(*stream->capture);
      return cudaErrorStreamCaptureUnsupported;
    }
    call.runtime.forget_done_orphans();
    if (stream->tail != nullptr && !stream->tail->done) {
      call.runtime.orphans.push_back(stream->tail);
    }
    call.runtime.streams.remove(handle);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return with_stream(__func__, Rule::usual, handle, [](const Call& call, Stream& stream) {
    if (const cudaError_t error = refuse_captured(call.runtime, stream)) return error;
    if (const cudaError_t error = call.runtime.refuse_unsafe(call.thread)) return error;
    return call.runtime.wait_for(call.lock, call.runtime.tails(stream), stream.device);
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return with_stream(__func__, Rule::usual, handle, [](const Call& call, Stream& stream) {
    if (const cudaError_t error = refuse_captured(call.runtime, stream)) return error;
    if (const cudaError_t error = call.runtime.refuse_unsafe(call.thread)) return error;
    if (const cudaError_t poison = call.runtime.devices[stream.device].poison) return poison;
    return call.runtime.query(call.runtime.tails(stream));
  });
}

cudaError_t cudaDeviceSynchronize() {
  return api(__func__, Rule::no_capture, [](const Call& call) {
    const int device = call.thread.device;
    return call.runtime.wait_for(call.lock, call.runtime.tails_of_device(device), device);
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return with_stream(__func__, Rule::usual, handle, [&](const Call&, Stream& stream) {
    *flags = stream.flags;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return with_stream(__func__, Rule::usual, handle, [&](const Call&, Stream& stream) {
    *priority = stream.priority;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  return with_stream(__func__, Rule::usual, handle, [&](const Call&, Stream& stream) {
    *id = stream.id;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return with_stream(__func__, Rule::usual, handle, [&](const Call&, Stream& stream) {
    *device = stream.device;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return api(__func__, Rule::usual, [&](const Call&) {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return with_stream(__func__, Rule::usual, handle, [&](const Call& call, Stream& stream) {
    if (function == nullptr) return cudaErrorInvalidValue;
    Plan plan;
    plan.kind = Kind::host_function;
    plan.work = [function, data] { function(data); };
    return call.runtime.submit(stream, std::move(plan));
  });
}
