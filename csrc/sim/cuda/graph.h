// Stream capture and graphs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "sim/cuda/task.h"

namespace pycoll::sim::cuda {

struct Stream;

struct Node {
  Plan plan;
  std::vector<size_t> after;  // indices of earlier nodes
};

// One capture sequence, from cudaStreamBeginCapture on; streams that wait for its events join it.
struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  uint64_t thread = 0;  // which began it
  std::weak_ptr<Stream> origin;
  std::vector<std::weak_ptr<Stream>> streams;
  std::vector<Node> nodes;
  bool invalid = false;
  bool ended = false;
};

struct Graph {
  std::vector<Node> nodes;
};

struct GraphExec {
  std::vector<Node> nodes;
  std::vector<size_t> leaves;  // nodes that no other comes after
  TaskPtr last;                // a launch comes after the one before it, on whatever stream
};

std::vector<size_t> leaves_of(const std::vector<Node>& nodes);
// Whether all of `wanted` are in `tail` or come before it.
bool reaches(const std::vector<Node>& nodes, const std::vector<size_t>& tail,
             const std::vector<size_t>& wanted);

}  // namespace pycoll::sim::cuda
