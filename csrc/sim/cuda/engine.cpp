#include "sim/cuda/engine.h"

#include <cstdlib>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/signals.h"
#include "sim/cuda/runtime.h"
#include "sim/cuda/shared_event.h"

namespace pycoll::sim::cuda {
namespace {

constexpr uint64_t kSwitchesPerStep = 2000;
constexpr std::chrono::microseconds kPoll{50};  // for other processes, and for gates

void stop_at_exit() {
  const Quiet quiet;
  Runtime& runtime = Runtime::instance();
  if (runtime.fork_mark.in_child()) return;  // its threads are in the parent
  Lock lock(runtime.mutex);
  runtime.engine.stop(lock);
}

}  // namespace

void Engine::post(const TaskPtr& task) {
  task->serial = ++last_serial_;
  sim::signal(&task->posted_key);  // what the caller did so far comes before
  for (const TaskPtr& earlier : task->after) {
    if (earlier->done) continue;
    earlier->before.push_back(task);
    ++task->missing;
  }
  if (task->missing == 0) ready_.push_back(task);
  if (!started_) {
    started_ = true;
    random_.seed(runtime_.settings.seed);
    std::atexit(stop_at_exit);
    const SignalsBlocked blocked;
    ++threads_;
    std::thread([this] { run(); }).detach();
  }
  work_.notify_all();
}

void Engine::pause(Lock& lock) {
  changed_.wait_for(lock, kPoll);
}

void Engine::stop(Lock& lock) {
  stopping_ = true;
  work_.notify_all();
  // A host function may never return, so no thread is joined and there is an end to the patience.
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  while (threads_ > 0 && Clock::now() < deadline) {
    changed_.wait_for(lock, std::chrono::milliseconds(10));
  }
}

// The engine's own view is hidden for as long as the thread lives: what it does for one stream must
// not come before what it does for the next.
void Engine::run() {
  const Quiet quiet;
  Lock lock(runtime_.mutex);
  while (!stopping_) {
    bool moved = start_one(lock);
    moved |= finish_polled();
    moved |= step(lock);
    if (!moved && !stopping_) idle(lock);
  }
  // Grids that are not done go with the process; the runtime is never destroyed.
  --threads_;
  changed_.notify_all();
}

void Engine::idle(Lock& lock) {
  if (ready_.empty() && polled_.empty()) {
    work_.wait(lock);
  } else {
    work_.wait_for(lock, kPoll);
  }
}

bool Engine::start_one(Lock& lock) {
  const size_t count = ready_.size();
  const size_t first = runtime_.settings.seeded && count > 0 ? random_() % count : 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t at = (first + i) % count;
    if (!ready_[at]->gate->open()) continue;
    const TaskPtr task = ready_[at];
    ready_.erase(ready_.begin() + static_cast<ptrdiff_t>(at));
    start(task, lock);
    return true;
  }
  return false;
}

// In the task's timeline: all that it comes after has been seen.
void Engine::begin_in_order(Task& task) {
  sim::wait(&task.posted_key);
  for (const TaskPtr& earlier : task.after) sim::wait(&earlier->done_key);
}

void Engine::start(const TaskPtr& task, Lock& lock) {
  Device& device = runtime_.devices[task->plan.device];
  if (device.poison == cudaSuccess && task->plan.kind == Kind::kernel) {
    device.poison = runtime_.faults.count("kernel");
  }
  if (device.poison != cudaSuccess) return finish(task);  // not done: callers get the error
  switch (task->plan.kind) {
    case Kind::marker:
      return finish(task);
    case Kind::memory:
      ++runtime_.counters.copies;
      return run_memory_work(task, lock);
    case Kind::host_function:
      return start_host_function(task);
    case Kind::kernel:
      return start_kernel(task);
    case Kind::poll:
      return polled_.push_back(task);
  }
}

void Engine::run_memory_work(const TaskPtr& task, Lock& lock) {
  lock.unlock();
  task->timeline->enter();
  begin_in_order(*task);
  task->plan.work();
  task->timeline->leave();
  lock.lock();
  finish(task);
}

void Engine::start_kernel(const TaskPtr& task) {
  const std::shared_ptr<const Kernel> kernel = task->plan.kernel;
  Processor& processor = processor_of(task->plan.device);
  task->timeline->enter();
  begin_in_order(*task);
  task->timeline->leave();
  Grid grid;
  grid.device = runtime_.devices[task->plan.device].machine_device;
  grid.grid = kernel->grid;
  grid.block = kernel->block;
  grid.shared_bytes = kernel->shared_bytes;
  grid.body = [kernel] { kernel->body(); };
  // Called inside of step(), without the lock.
  grid.done = [this, task, &processor] {
    const Lock lock(runtime_.mutex);
    --processor.grids;
    count_spins();  // whoever waits for the kernel may ask
    finish(task);
  };
  grid.timeline = task->timeline.get();
  ++processor.grids;
  ++runtime_.counters.launches;
  processor.executor->launch(std::move(grid));
}

bool Engine::finish_polled() {
  bool any = false;
  for (size_t i = 0; i < polled_.size();) {
    const TaskPtr task = polled_[i];
    bool done = runtime_.devices[task->plan.device].poison != cudaSuccess;
    if (!done) {
      task->timeline->enter();
      begin_in_order(*task);
      done = task->plan.poll();
      task->timeline->leave();
    }
    if (!done) {
      ++i;
      continue;
    }
    polled_.erase(polled_.begin() + static_cast<ptrdiff_t>(i));
    finish(task);
    any = true;
  }
  return any;
}

bool Engine::step(Lock& lock) {
  bool any = false;
  for (Processor& processor : processors_) {
    if (processor.grids == 0) continue;
    const uint64_t switches =
        runtime_.settings.seeded ? 1 + random_() % kSwitchesPerStep : kSwitchesPerStep;
    lock.unlock();
    processor.executor->step(switches);
    lock.lock();
    any = true;
  }
  if (any) count_spins();
  return any;
}

void Engine::count_spins() {
  Counters& counters = runtime_.counters;
  counters.spins = counters.outside_spins = counters.spins_across_processes = 0;
  for (const Processor& processor : processors_) {
    if (processor.executor == nullptr) continue;
    counters.spins += processor.executor->stats().spins;
    counters.outside_spins += processor.executor->stats().outside_spins;
    if (processor.slice != nullptr) {
      counters.spins_across_processes += processor.slice->spins_across_processes();
    }
  }
}

void Engine::finish(const TaskPtr& task) {
  const Device& device = runtime_.devices[task->plan.device];
  if (task->shared_event != nullptr && task->plan.records != nullptr &&
      device.poison == cudaSuccess) {
    task->shared_event->finish(task->ticket);
  }
  task->timeline->enter();
  if (task->plan.kind == Kind::marker || device.poison != cudaSuccess) {
    begin_in_order(*task);
  }
  sim::signal(&task->done_key);
  task->timeline->leave();
  task->done = true;
  task->done_at = Clock::now();
  task->after.clear();
  task->plan = plan_for(task->plan.device);  // what it holds may be freed now
  for (const TaskPtr& later : std::exchange(task->before, {})) {
    if (--later->missing == 0) ready_.push_back(later);
  }
  work_.notify_all();
  changed_.notify_all();
}

// Each in a thread of its own, which is what ThreadSanitizer takes as one: a common thread's stack
// would be written by host functions that nothing orders.
void Engine::start_host_function(const TaskPtr& task) {
  ++runtime_.counters.host_functions;
  ++threads_;
  std::thread([this, task] {
    this_thread().in_host_function = true;
    begin_in_order(*task);
    task->plan.work();
    sim::signal(&task->done_key);
    const Quiet quiet;
    const Lock lock(runtime_.mutex);
    finish(task);
    --threads_;
  }).detach();
}

// One for all devices, so that their kernels are interleaved finely; one for each where devices are
// shared by time slices, because a process may have one device and wait for another.
Engine::Processor& Engine::processor_of(int device) {
  const Settings& settings = runtime_.settings;
  const bool sliced = !settings.slice_file.empty();
  if (processors_.empty()) processors_.resize(sliced ? runtime_.devices.size() : 1);
  Processor& processor = processors_[sliced ? device : 0];
  if (processor.executor != nullptr) return processor;
  Options options;
  options.policy = settings.seeded ? Policy::random : Policy::round_robin;
  options.seed = settings.seed;
  options.max_resident = settings.resident;
  options.external = true;
  options.timeout_s = settings.timeout_s;
  if (sliced) {
    const int machine_device = runtime_.devices[device].machine_device;
    const std::string file = settings.slice_file + "." + std::to_string(machine_device);
    try {
      processor.slice = std::make_unique<TimeSlice>(file);
    } catch (const std::system_error& error) {
      give_up("PYCOLL_SIM_SLICE_FILE: " + std::string(error.what()));
    }
    options.time_slice = processor.slice.get();
  }
  processor.executor = std::make_unique<Executor>(options);
  return processor;
}

}  // namespace pycoll::sim::cuda
