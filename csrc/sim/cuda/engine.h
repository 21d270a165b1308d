// The "GPUs" of one process: one thread that does what streams have to do, in an order that
// respects what comes after what and is otherwise free (random, by seed), and steps the threads of
// all kernels that run. Host functions run in threads of their own, off the engine, as with CUDA.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "sim/cuda/quiet.h"
#include "sim/cuda/task.h"
#include "sim/simt.h"
#include "sim/time_slice.h"

namespace pycoll::sim::cuda {

class Runtime;

class Engine {
 public:
  explicit Engine(Runtime& runtime) : runtime_(runtime) {}

  // All with the runtime's lock held.

  // From a host thread. The engine's threads begin with the first task.
  void post(const TaskPtr& task);
  void wait(Lock& lock) { changed_.wait(lock); }  // until some task is done
  void pause(Lock& lock);  // for a moment, until another process may have done something
  void wake() { work_.notify_all(); }  // a gate has opened
  // At the end of the process: threads end, whatever is left to do.
  void stop(Lock& lock);
  bool stopping() const { return stopping_; }

 private:
  void run();
  bool start_one(Lock& lock);
  void start(const TaskPtr& task, Lock& lock);
  void run_memory_work(const TaskPtr& task, Lock& lock);
  void start_kernel(const TaskPtr& task);
  void start_host_function(const TaskPtr& task);
  bool finish_polled();
  bool step(Lock& lock);
  void idle(Lock& lock);
  void finish(const TaskPtr& task);
  void begin_in_order(Task& task);
  void count_spins();

  Runtime& runtime_;
  Condition work_;     // for the engine's threads
  Condition changed_;  // for callers
  int threads_ = 0;    // that run
  bool started_ = false;
  bool stopping_ = false;
  uint64_t last_serial_ = 0;
  std::mt19937_64 random_;
  std::vector<TaskPtr> ready_;
  std::vector<TaskPtr> polled_;

  struct Processor {  // what runs the kernels of one device, or of all
    std::unique_ptr<TimeSlice> slice;
    std::unique_ptr<Executor> executor;
    uint64_t grids = 0;  // launched and not done
  };
  std::vector<Processor> processors_;
  Processor& processor_of(int device);
};

}  // namespace pycoll::sim::cuda
