#include "sim/cuda/runtime.h"

#include <algorithm>
#include <atomic>

#include "sim/cuda/shared_event.h"

namespace pycoll::sim::cuda {

ThreadState& this_thread() {
  static std::atomic<uint64_t> threads{0};
  thread_local ThreadState state{.id = threads.fetch_add(1, std::memory_order_relaxed) + 1};
  return state;
}

namespace {

// Errors of kernels, which whatever call comes next reports, and all after it.
bool is_sticky(cudaError_t code) {
  return code == cudaErrorECCUncorrectable || code == cudaErrorIllegalAddress ||
         code == cudaErrorLaunchTimeout || code == cudaErrorAssert ||
         (code >= cudaErrorHardwareStackError && code <= cudaErrorLaunchFailure);
}

}  // namespace

Runtime& Runtime::instance() {
  static auto* runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime() : settings(Settings::from_env()), engine(*this) {
  faults.add_all(settings.faults);
  for (const int machine_device : settings.devices) {
    Device device;
    device.machine_device = machine_device;
    const int ordinal = static_cast<int>(devices.size());
    device.legacy = make_stream(ordinal, cudaStreamDefault, 0);
    device.legacy->legacy = true;
    devices.push_back(std::move(device));
  }
}

cudaError_t Runtime::enter(const char* function, Rule rule, ThreadState& thread) {
  if (rule == Rule::always) return cudaSuccess;
  if (thread.in_host_function) return cudaErrorNotPermitted;
  if (fork_mark.in_child()) return cudaErrorInitializationError;
  if (engine.stopping()) return cudaErrorCudartUnloading;
  if (devices.empty()) return cudaErrorNoDevice;
  ++counters.calls;
  Device& device = device_of(thread);
  if (rule != Rule::question) device.has_context = true;
  if (const cudaError_t fault = faults.count(function)) {
    if (is_sticky(fault)) device.poison = fault;
    return fault;
  }
  if (device.poison != cudaSuccess) return device.poison;
  return rule == Rule::no_capture ? refuse_unsafe(thread) : cudaSuccess;
}

std::shared_ptr<Stream> Runtime::make_stream(int device, unsigned flags, int priority) {
  auto made = std::make_shared<Stream>();
  made->device = device;
  made->flags = flags;
  made->priority = priority;
  made->id = ++last_id;
  return made;
}

std::shared_ptr<Stream> Runtime::stream(cudaStream_t handle, const ThreadState& thread) {
  if (handle == nullptr || handle == cudaStreamLegacy) return devices[thread.device].legacy;
  if (handle != cudaStreamPerThread) return streams.find(handle);
  auto& own = thread_streams[{thread.id, thread.device}];
  if (own == nullptr) own = make_stream(thread.device, cudaStreamDefault, 0);
  return own;
}

template <class Visit>
void Runtime::each_stream(int device, Visit&& visit) const {
  visit(*devices[device].legacy);
  for (const auto& [handle, stream] : streams.all()) {
    if (stream->device == device) visit(*stream);
  }
  for (const auto& [key, stream] : thread_streams) {
    if (stream->device == device) visit(*stream);
  }
}

std::vector<TaskPtr> Runtime::tails(const Stream& stream) const {
  std::vector<TaskPtr> found;
  if (stream.tail != nullptr) found.push_back(stream.tail);
  if (!stream.legacy) return found;
  each_stream(stream.device, [&](const Stream& other) {
    if (!other.legacy && other.blocking() && other.tail != nullptr) found.push_back(other.tail);
  });
  return found;
}

std::vector<TaskPtr> Runtime::tails_of_device(int device) const {
  std::vector<TaskPtr> found;
  each_stream(device, [&](const Stream& stream) {
    if (stream.tail != nullptr) found.push_back(stream.tail);
  });
  for (const TaskPtr& task : orphans) {
    if (task->plan.device == device) found.push_back(task);
  }
  return found;
}

void Runtime::forget_done_orphans() {
  std::erase_if(orphans, [](const TaskPtr& task) { return task->done; });
}

cudaError_t Runtime::wait_for(Lock& lock, const std::vector<TaskPtr>& tasks, int device) {
  for (const TaskPtr& task : tasks) {
    while (!task->done && !engine.stopping()) engine.wait(lock);
    if (!task->done) return cudaErrorCudartUnloading;
    sim::wait(&task->done_key);
  }
  return devices[device].poison;
}

cudaError_t Runtime::query(const std::vector<TaskPtr>& tasks) const {
  for (const TaskPtr& task : tasks) {
    if (!task->done) return cudaErrorNotReady;
  }
  for (const TaskPtr& task : tasks) sim::wait(&task->done_key);
  return cudaSuccess;
}

cudaError_t Runtime::submit(Stream& stream, Plan plan, TaskPtr* posted) {
  plan.device = stream.device;
  if (stream.capture != nullptr) return add_node(stream, std::move(plan));
  if (stream.legacy) {
    if (const cudaError_t error = refuse_implicit(stream)) return error;
  }
  if (const cudaError_t poison = devices[stream.device].poison) return poison;
  TaskPtr task = post(stream, std::move(plan));
  if (posted != nullptr) *posted = std::move(task);
  return cudaSuccess;
}

TaskPtr Runtime::post(Stream& stream, Plan plan, std::vector<TaskPtr> more) {
  auto task = std::make_shared<Task>();
  task->plan = std::move(plan);
  task->gate = stream.gate;
  task->timeline = stream.timeline;
  task->after = tails(stream);
  const Stream& legacy = *devices[stream.device].legacy;
  if (!stream.legacy && stream.blocking() && legacy.tail != nullptr) {
    task->after.push_back(legacy.tail);
  }
  task->after.insert(task->after.end(), more.begin(), more.end());
  stream.tail = task;
  return post_task(std::move(task));
}

TaskPtr Runtime::post_alone(Stream& stream, Plan plan, std::vector<TaskPtr> after) {
  auto task = std::make_shared<Task>();
  task->plan = std::move(plan);
  task->gate = stream.gate;
  task->timeline = std::make_shared<Timeline>();
  task->after = std::move(after);
  return post_task(std::move(task));
}

TaskPtr Runtime::post_task(TaskPtr task) {
  resolve_event_wait(*task);
  resolve_event_record(task);
  engine.post(task);
  return task;
}

// A wait is for the last record before it; if there was none, it is for nothing. A record of this
// process is known by its task even where the event is shared, for the sake of order inside of it.
void Runtime::resolve_event_wait(Task& task) {
  const std::shared_ptr<Event> event = std::exchange(task.plan.waits, nullptr);
  if (event == nullptr) return;
  const uint64_t last = event->shared != nullptr ? event->shared->last() : 0;
  if (event->recorded != nullptr && (event->shared == nullptr || event->recorded->ticket == last)) {
    task.after.push_back(event->recorded);
  } else if (last > 0) {
    task.plan.kind = Kind::poll;
    task.plan.poll = [shared = event->shared, last] { return shared->finished(last); };
  }
}

void Runtime::resolve_event_record(const TaskPtr& task) {
  Event* event = task->plan.records.get();
  if (event == nullptr) return;
  if (event->shared != nullptr) {
    task->shared_event = event->shared;
    task->ticket = event->shared->issue();
  }
  event->recorded = task;
  event->capture = nullptr;
}

}  // namespace pycoll::sim::cuda
