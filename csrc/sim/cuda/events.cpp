// Events, those that processes share too.
#include <algorithm>
#include <cstring>

#include "sim/cuda/runtime.h"
#include "sim/cuda/shared_event.h"

namespace pycoll::sim::cuda {
namespace {

constexpr unsigned kFlags = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;

// The layout of a cudaIpcEventHandle_t.
struct EventHandle {
  uint64_t magic;
  FileName name;
  int32_t machine_device;
};
constexpr uint64_t kMagic = 0x70'79'63'6f'6c'6c'65'76;
static_assert(sizeof(EventHandle) <= sizeof(cudaIpcEventHandle_t));

cudaError_t create(const Call& call, cudaEvent_t* event, unsigned flags) {
  if (event == nullptr || (flags & ~kFlags) != 0) return cudaErrorInvalidValue;
  auto made = std::make_shared<Event>();
  made->device = call.thread.device;
  made->flags = flags;
  if ((flags & cudaEventInterprocess) != 0) {
    if (made->timed()) return cudaErrorInvalidValue;
    made->shared = SharedEvent::create();
    if (made->shared == nullptr) return cudaErrorMemoryAllocation;
  }
  *event = call.runtime.events.add(std::move(made));
  return cudaSuccess;
}

cudaError_t record(const Call& call, cudaEvent_t handle, cudaStream_t on, unsigned flags) {
  if ((flags & ~unsigned{cudaEventRecordExternal}) != 0) return cudaErrorInvalidValue;
  const bool external = (flags & cudaEventRecordExternal) != 0;
  const auto event = call.runtime.events.find(handle);
  const auto stream = call.runtime.stream(on, call.thread);
  if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (event->device != stream->device) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr && !external) {
    if (stream->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    event->capture = stream->capture;
    event->capture_nodes = stream->capture_tail;
    return cudaSuccess;
  }
  if (stream->capture == nullptr && external) return cudaErrorInvalidValue;
  Plan plan;
  plan.records = event;
  return call.runtime.submit(*stream, std::move(plan));
}

// A stream waits for an event that was recorded in a capture: it joins that capture.
cudaError_t join(const Call& call, const std::shared_ptr<Stream>& stream, const Event& event) {
  const std::shared_ptr<Capture>& capture = event.capture;
  if (stream->capture != nullptr && stream->capture != capture) {
    call.runtime.invalidate(*stream->capture);
    if (capture->ended) return cudaErrorStreamCaptureIsolation;
    call.runtime.invalidate(*capture);
    return cudaErrorStreamCaptureMerge;
  }
  if (capture->ended) return cudaErrorCapturedEvent;
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (stream->legacy) {
    call.runtime.invalidate(*capture);
    return cudaErrorStreamCaptureImplicit;
  }
  if (stream->capture == nullptr) {
    stream->capture = capture;
    stream->capture_tail.clear();
    capture->streams.push_back(stream);
  }
  auto& tail = stream->capture_tail;
  for (const size_t node : event.capture_nodes) {
    if (std::find(tail.begin(), tail.end(), node) == tail.end()) tail.push_back(node);
  }
  return cudaSuccess;
}

cudaError_t wait(const Call& call, cudaStream_t by, cudaEvent_t handle, unsigned flags) {
  if ((flags & ~unsigned{cudaEventWaitExternal}) != 0) return cudaErrorInvalidValue;
  const bool external = (flags & cudaEventWaitExternal) != 0;
  const auto stream = call.runtime.stream(by, call.thread);
  const auto event = call.runtime.events.find(handle);
  if (stream == nullptr || event == nullptr) return cudaErrorInvalidResourceHandle;
  if (event->capture != nullptr && !external) return join(call, stream, *event);
  if (stream->capture == nullptr && external) return cudaErrorInvalidValue;
  const bool recorded =
      event->recorded != nullptr || (event->shared != nullptr && event->shared->last() > 0);
  if (stream->capture != nullptr && !external) {
    if (!recorded) return cudaSuccess;
    // Work outside of the capture cannot come before work inside.
    call.runtime.invalidate(*stream->capture);
    return cudaErrorStreamCaptureIsolation;
  }
  if (!recorded && !external) return cudaSuccess;
  Plan plan;
  plan.waits = event;
  return call.runtime.submit(*stream, std::move(plan));
}

// The host asks for the state of an event. One that was last recorded in a capture has none.
template <class Body>
cudaError_t with_state(const char* function, cudaEvent_t handle, Body&& body) {
  return api(function, Rule::no_capture, [&](const Call& call) {
    const auto event = call.runtime.events.find(handle);
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (event->capture != nullptr) {
      if (!event->capture->ended) call.runtime.invalidate(*event->capture);
      return cudaErrorCapturedEvent;
    }
    return body(call, *event);
  });
}

// Of the last record: by this process, or by another one.
bool last_is_ours(const Event& event) {
  return event.shared == nullptr ||
         (event.recorded != nullptr && event.recorded->ticket == event.shared->last());
}

bool last_is_done(const Event& event) {
  if (last_is_ours(event)) return event.recorded == nullptr || event.recorded->done;
  const uint64_t last = event.shared->last();
  return last == 0 || event.shared->finished(last);
}

}  // namespace
}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return create(call, event, cudaEventDefault); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return api(__func__, Rule::usual, [&](const Call& call) { return create(call, event, flags); });
}

// What was recorded goes on; waits for it are still waits for it.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    return call.runtime.events.remove(event) != nullptr ? cudaSuccess
                                                        : cudaErrorInvalidResourceHandle;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return record(call, event, stream, cudaEventRecordDefault); });
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return record(call, event, stream, flags); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return api(__func__, Rule::usual,
             [&](const Call& call) { return wait(call, stream, event, flags); });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return with_state(__func__, handle, [](const Call& call, Event& event) {
    if (!last_is_done(event)) return cudaErrorNotReady;
    if (!last_is_ours(event) || event.recorded == nullptr) return cudaSuccess;
    return call.runtime.query({event.recorded});
  });
}

// For what is recorded now: a later record by another thread does not make it longer.
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return with_state(__func__, handle, [](const Call& call, Event& event) {
    std::vector<TaskPtr> tasks;
    if (last_is_ours(event)) {
      if (event.recorded != nullptr) tasks.push_back(event.recorded);
    } else {
      const std::shared_ptr<SharedEvent> shared = event.shared;
      const uint64_t last = shared->last();
      while (last > 0 && !shared->finished(last)) {
        if (call.runtime.engine.stopping()) return cudaErrorCudartUnloading;
        call.runtime.engine.pause(call.lock);
      }
    }
    return call.runtime.wait_for(call.lock, tasks, event.device);
  });
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const auto first = call.runtime.events.find(start), second = call.runtime.events.find(end);
    if (first == nullptr || second == nullptr) return cudaErrorInvalidResourceHandle;
    for (const auto& event : {first, second}) {
      if (!event->timed() || event->recorded == nullptr) return cudaErrorInvalidResourceHandle;
      if (event->capture != nullptr) return cudaErrorCapturedEvent;
    }
    if (!first->recorded->done || !second->recorded->done) return cudaErrorNotReady;
    const auto time = second->recorded->done_at - first->recorded->done_at;
    *ms = std::chrono::duration<float, std::milli>(time).count();
    return cudaSuccess;
  });
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const auto found = call.runtime.events.find(event);
    if (found == nullptr || found->shared == nullptr) return cudaErrorInvalidResourceHandle;
    // An event that was opened here is another process's to export.
    if (found->shared->name().descriptor < 0) return cudaErrorInvalidResourceHandle;
    const EventHandle inside{kMagic, found->shared->name(),
                             call.runtime.devices[found->device].machine_device};
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &inside, sizeof(inside));
    return cudaSuccess;
  });
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    EventHandle inside;
    std::memcpy(static_cast<void*>(&inside), &handle, sizeof(inside));
    if (event == nullptr || inside.magic != kMagic) return cudaErrorInvalidValue;
    if (inside.name.process == ::getpid()) return cudaErrorDeviceUninitialized;
    auto made = std::make_shared<Event>();
    made->device = call.thread.device;
    made->flags = cudaEventDisableTiming | cudaEventInterprocess;
    made->shared = SharedEvent::open(inside.name);
    if (made->shared == nullptr) return cudaErrorMapBufferObjectFailed;
    *event = call.runtime.events.add(std::move(made));
    return cudaSuccess;
  });
}
