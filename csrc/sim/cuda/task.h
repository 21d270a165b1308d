// The work of all streams, as one graph of tasks: a task starts when all it comes after are done.
//
// A stream is a chain of them, an event is a pointer to one, waiting for an event is an edge, and a
// replayed graph is a copy of the captured one between two markers. So there is one rule of order
// for everything, and what ThreadSanitizer is told follows the same edges.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "sim/timeline.h"

namespace pycoll::sim::cuda {

using Clock = std::chrono::steady_clock;

struct Event;
class SharedEvent;

enum class Kind : uint8_t {
  marker,         // only order
  memory,         // `work` on the engine thread: copies, freeing
  host_function,  // `work` in a thread of its own
  kernel,
  poll,  // until `poll` says so: what another process, or a kernel, will do
};

struct Kernel {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  std::function<void()> body;
};

// What is to be done, wherever and however often: a graph holds these.
struct Plan {
  Kind kind = Kind::marker;
  std::function<void()> work;
  std::function<bool()> poll;
  std::shared_ptr<const Kernel> kernel;
  std::shared_ptr<Event> records;  // the event that this marks
  std::shared_ptr<Event>
      waits;  // the event whose last record, at the time of posting, comes before
  int device = 0;
};

inline Plan plan_for(int device) {
  Plan marker;
  marker.device = device;
  return marker;
}

// Tests hold and delay streams by it.
struct Gate {
  bool held = false;
  Clock::time_point not_before{};
  bool open() const { return !held && Clock::now() >= not_before; }
};

struct Task {
  Plan plan;
  uint64_t serial = 0;  // in order of posting
  std::shared_ptr<Gate> gate;
  // Whose order it belongs to: its stream's, or its own inside of a graph.
  std::shared_ptr<Timeline> timeline;
  std::vector<std::shared_ptr<Task>> after;  // forgotten when it starts, so that chains are freed
  std::vector<std::shared_ptr<Task>> before;
  size_t missing = 0;  // of `after`, those not done
  // Of a record of a shared event: which one it is.
  std::shared_ptr<SharedEvent> shared_event;
  uint64_t ticket = 0;
  bool done = false;
  Clock::time_point done_at{};
  // Addresses that stand for "it was posted" and "it is done" (sim/timeline.h).
  char posted_key = 0;
  char done_key = 0;
};

using TaskPtr = std::shared_ptr<Task>;

}  // namespace pycoll::sim::cuda
