// The state of the simulated CUDA runtime in one process, and how a call of the API goes through
// it.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/fork_mark.h"
#include "sim/control.h"
#include "sim/cuda/engine.h"
#include "sim/cuda/faults.h"
#include "sim/cuda/graph.h"
#include "sim/cuda/handles.h"
#include "sim/cuda/memory.h"
#include "sim/cuda/quiet.h"
#include "sim/cuda/settings.h"
#include "sim/cuda/stream.h"

static_assert(CUDART_VERSION >= 13000, "the simulated runtime has the prototypes of CUDA 13");

namespace pycoll::sim::cuda {

struct Device {
  int machine_device = 0;  // which of the machine's: processes that share it agree on this number
  cudaError_t poison = cudaSuccess;  // what a kernel failed with; every later call returns it
  std::shared_ptr<Stream> legacy;
  std::set<int> enabled_peers;
  std::set<int> impossible_peers;
  bool has_context = false;  // this process has used it
};

// What CUDA keeps for each thread.
struct ThreadState {
  uint64_t id = 0;
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  bool in_host_function = false;
};
ThreadState& this_thread();

// When a call is refused.
enum class Rule : uint8_t {
  always,      // it has no state to spoil: never
  question,    // inside host functions, in a forked child, on a poisoned device
  usual,       // likewise; and the thread's device gets a context
  no_capture,  // and while a capture forbids "potentially unsafe" calls
};

class Runtime {
 public:
  // One a process, never destroyed: CUDA's API has no object to hold it, and may be called until
  // the very end.
  static Runtime& instance();

  // What comes before each call; the lock is held.
  cudaError_t enter(const char* function, Rule rule, ThreadState& thread);

  Device& device_of(const ThreadState& thread) { return devices.at(thread.device); }
  bool is_device(int device) const {
    return device >= 0 && device < static_cast<int>(devices.size());
  }

  // ---- streams ----
  std::shared_ptr<Stream> make_stream(int device, unsigned flags, int priority);
  // Null: there is no such stream. Knows the legacy and the per-thread stream.
  std::shared_ptr<Stream> stream(cudaStream_t handle, const ThreadState& thread);
  // Puts the plan on the stream, or into its capture. `posted`, if given, gets the task; it stays
  // null where the plan was captured.
  cudaError_t submit(Stream& stream, Plan plan, TaskPtr* posted = nullptr);
  // Puts it behind all that is on the stream, and behind `more`.
  TaskPtr post(Stream& stream, Plan plan, std::vector<TaskPtr> more = {});
  // Puts it behind those and nothing else: the stream only lends its gate. Nodes of a graph.
  TaskPtr post_alone(Stream& stream, Plan plan, std::vector<TaskPtr> after);
  void post_graph(Stream& stream, GraphExec& exec);
  // What a stream, or all of a device, has to do: done when these are.
  std::vector<TaskPtr> tails(const Stream& stream) const;
  std::vector<TaskPtr> tails_of_device(int device) const;
  // What the device has failed with, or cudaErrorCudartUnloading: the process ends and they never
  // will be done.
  cudaError_t wait_for(Lock& lock, const std::vector<TaskPtr>& tasks, int device);
  cudaError_t query(const std::vector<TaskPtr>& tasks) const;
  void forget_done_orphans();

  // ---- captures (graphs.cpp) ----
  cudaError_t add_node(Stream& stream, Plan plan);
  void invalidate(Capture& capture) { capture.invalid = true; }
  // cudaErrorStreamCaptureUnsupported if captures under way forbid it, and these are invalid then.
  cudaError_t refuse_unsafe(const ThreadState& thread);
  // The legacy stream was used while a stream is captured that it is ordered with.
  cudaError_t refuse_implicit(const Stream& legacy);

  Mutex mutex;  // guards all below, and what it points to
  const Settings settings;
  const ForkMark fork_mark;
  Faults faults;
  Counters counters{};
  Memory memory;
  std::vector<Device> devices;
  Handles<Stream, cudaStream_t> streams;
  std::map<std::pair<uint64_t, int>, std::shared_ptr<Stream>> thread_streams;
  std::vector<TaskPtr> orphans;  // last tasks of streams that were destroyed before they were done
  Handles<Event, cudaEvent_t> events;
  Handles<Graph, cudaGraph_t> graphs;
  Handles<GraphExec, cudaGraphExec_t> graph_execs;
  std::vector<std::shared_ptr<Capture>> captures;  // under way
  std::map<const void*, int> shared_limits;        // of functions, by cudaFuncSetAttribute
  uint64_t last_id = 0;                            // of streams and captures
  Engine engine;

 private:
  Runtime();
  template <class Visit>
  void each_stream(int device, Visit&& visit) const;
  TaskPtr post_task(TaskPtr task);
  void resolve_event_wait(Task& task);
  void resolve_event_record(const TaskPtr& task);
};

struct Call {
  Runtime& runtime;
  Lock& lock;
  ThreadState& thread;
  Device& device() const { return runtime.device_of(thread); }
};

// A forked child may find the mutex taken by a thread that it does not have: it goes without.
inline Lock lock_of_caller(Runtime& runtime) {
  if (runtime.fork_mark.in_child()) return {runtime.mutex, std::defer_lock};
  return Lock(runtime.mutex);
}

// Every function of the API: `body` gets a Call with the lock held, and its error becomes the
// thread's last one.
template <class Body>
cudaError_t api(const char* function, Rule rule, Body&& body) {
  const Quiet quiet;
  Runtime& runtime = Runtime::instance();
  ThreadState& thread = this_thread();
  Lock lock = lock_of_caller(runtime);
  cudaError_t error = runtime.enter(function, rule, thread);
  if (error == cudaSuccess) error = body(Call{runtime, lock, thread});
  if (error != cudaSuccess) thread.last_error = error;
  return error;
}

}  // namespace pycoll::sim::cuda
