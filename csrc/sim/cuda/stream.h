// Streams and events of the simulated runtime.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "sim/cuda/task.h"

namespace pycoll::sim::cuda {

struct Capture;

struct Stream {
  int device = 0;
  unsigned flags = cudaStreamDefault;
  int priority = 0;
  unsigned long long id = 0;
  bool legacy = false;
  TaskPtr tail;  // the last that was put on it; null: nothing ever
  std::shared_ptr<Gate> gate = std::make_shared<Gate>();
  std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();
  // While the stream is being captured: what its next node comes after.
  std::shared_ptr<Capture> capture;
  std::vector<size_t> capture_tail;

  // Ordered with the legacy stream of its device.
  bool blocking() const { return (flags & cudaStreamNonBlocking) == 0; }
};

struct Event {
  int device = 0;
  unsigned flags = cudaEventDefault;
  TaskPtr recorded;                     // its last record in this process; null: none
  std::shared_ptr<SharedEvent> shared;  // of cudaEventInterprocess
  // Of a record in a capturing stream: which capture, and after which of its nodes. Kept after the
  // capture ended: such an event cannot be queried before it is recorded again.
  std::shared_ptr<Capture> capture;
  std::vector<size_t> capture_nodes;

  bool timed() const { return (flags & cudaEventDisableTiming) == 0; }
};

}  // namespace pycoll::sim::cuda
