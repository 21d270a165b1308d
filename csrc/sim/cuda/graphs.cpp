#include <algorithm>
#include <utility>

#include "sim/cuda/runtime.h"

namespace pycoll::sim::cuda {

std::vector<size_t> leaves_of(const std::vector<Node>& nodes) {
  std::vector<bool> inner(nodes.size());
  for (const Node& node : nodes) {
    for (const size_t earlier : node.after) inner[earlier] = true;
  }
  std::vector<size_t> leaves;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (!inner[i]) leaves.push_back(i);
  }
  return leaves;
}

bool reaches(const std::vector<Node>& nodes, const std::vector<size_t>& tail,
             const std::vector<size_t>& wanted) {
  std::vector<bool> seen(nodes.size());
  for (const size_t node : tail) seen[node] = true;
  // Nodes come after earlier ones only, so one pass from the end finds all.
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!seen[i]) continue;
    for (const size_t earlier : nodes[i].after) seen[earlier] = true;
  }
  return std::all_of(wanted.begin(), wanted.end(), [&](size_t node) { return seen[node]; });
}

cudaError_t Runtime::add_node(Stream& stream, Plan plan) {
  Capture& capture = *stream.capture;
  if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
  capture.nodes.push_back({std::move(plan), stream.capture_tail});
  stream.capture_tail = {capture.nodes.size() - 1};
  return cudaSuccess;
}

// CUDA's table of three modes of the thread and three of each capture.
cudaError_t Runtime::refuse_unsafe(const ThreadState& thread) {
  if (thread.capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool refused = false;
  for (const auto& capture : captures) {
    const bool own = capture->thread == thread.id && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool global = capture->mode == cudaStreamCaptureModeGlobal &&
                        thread.capture_mode == cudaStreamCaptureModeGlobal;
    if (!own && !global) continue;
    invalidate(*capture);
    refused = true;
  }
  return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t Runtime::refuse_implicit(const Stream& legacy) {
  bool refused = false;
  for (const auto& capture : captures) {
    for (const auto& weak : capture->streams) {
      const auto stream = weak.lock();
      if (stream == nullptr || stream->device != legacy.device || !stream->blocking()) continue;
      invalidate(*capture);
      refused = true;
    }
  }
  return refused ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

namespace {

template <class Body>
cudaError_t with_stream(const char* function, cudaStream_t handle, Body&& body) {
  return api(function, Rule::usual, [&](const Call& call) {
    const auto stream = call.runtime.stream(handle, call.thread);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : body(call, stream);
  });
}

cudaError_t begin(const Call& call, const std::shared_ptr<Stream>& stream,
                  cudaStreamCaptureMode mode) {
  if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) {
    return cudaErrorInvalidValue;
  }
  if (stream->legacy) return cudaErrorStreamCaptureUnsupported;
  if (stream->capture != nullptr) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->id = ++call.runtime.last_id;
  capture->mode = mode;
  capture->thread = call.thread.id;
  capture->origin = stream;
  capture->streams.push_back(stream);
  stream->capture = capture;
  stream->capture_tail.clear();
  call.runtime.captures.push_back(std::move(capture));
  return cudaSuccess;
}

// Whether all that was forked has been joined again.
bool joined(const Capture& capture, const Stream& origin) {
  for (const auto& weak : capture.streams) {
    const auto stream = weak.lock();
    if (stream != nullptr && !reaches(capture.nodes, origin.capture_tail, stream->capture_tail)) {
      return false;
    }
  }
  return reaches(capture.nodes, origin.capture_tail, leaves_of(capture.nodes));
}

cudaError_t end(const Call& call, Stream& stream, cudaGraph_t* graph) {
  const std::shared_ptr<Capture> capture = stream.capture;
  if (graph == nullptr) return cudaErrorInvalidValue;
  *graph = nullptr;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (capture->origin.lock().get() != &stream) {
    call.runtime.invalidate(*capture);
    return cudaErrorStreamCaptureUnmatched;
  }
  const bool wrong_thread =
      capture->thread != call.thread.id && capture->mode != cudaStreamCaptureModeRelaxed;
  if (wrong_thread) return cudaErrorStreamCaptureWrongThread;
  const bool whole = joined(*capture, stream);
  capture->ended = true;
  std::erase(call.runtime.captures, capture);
  for (const auto& weak : capture->streams) {
    if (const auto member = weak.lock()) member->capture = nullptr;
  }
  if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
  if (!whole) return cudaErrorStreamCaptureUnjoined;
  auto made = std::make_shared<Graph>();
  made->nodes = std::move(capture->nodes);
  *graph = call.runtime.graphs.add(std::move(made));
  return cudaSuccess;
}

cudaStreamCaptureStatus status_of(const Stream& stream) {
  if (stream.capture == nullptr) return cudaStreamCaptureStatusNone;
  return stream.capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
}

// A launch inside of a capture becomes part of it.
cudaError_t embed(Stream& stream, const GraphExec& exec) {
  Capture& capture = *stream.capture;
  if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
  const size_t first = capture.nodes.size();
  for (const Node& node : exec.nodes) {
    Node copy = node;
    for (size_t& earlier : copy.after) earlier += first;
    if (copy.after.empty()) copy.after = stream.capture_tail;
    capture.nodes.push_back(std::move(copy));
  }
  if (exec.nodes.empty()) return cudaSuccess;
  stream.capture_tail = exec.leaves;
  for (size_t& leaf : stream.capture_tail) leaf += first;
  return cudaSuccess;
}

}  // namespace

// The nodes between two markers. The first comes after the stream and after the launch before it:
// an executable graph never runs twice at a time. Each node has a timeline of its own, since only
// the edges of the graph order nodes.
void Runtime::post_graph(Stream& stream, GraphExec& exec) {
  std::vector<TaskPtr> before;
  if (exec.last != nullptr) before.push_back(exec.last);
  const TaskPtr start = post(stream, plan_for(stream.device), std::move(before));
  std::vector<TaskPtr> tasks;
  for (const Node& node : exec.nodes) {
    std::vector<TaskPtr> after{start};
    for (const size_t earlier : node.after) after.push_back(tasks[earlier]);
    tasks.push_back(post_alone(stream, node.plan, std::move(after)));
  }
  std::vector<TaskPtr> ends;
  for (const size_t leaf : exec.leaves) ends.push_back(tasks[leaf]);
  exec.last = post(stream, plan_for(stream.device), std::move(ends));
  ++counters.graph_launches;
}

}  // namespace pycoll::sim::cuda

using namespace pycoll::sim::cuda;

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return with_stream(__func__, handle,
                     [&](const Call& call, const std::shared_ptr<Stream>& stream) {
                       return begin(call, stream, mode);
                     });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return with_stream(__func__, handle,
                     [&](const Call& call, const std::shared_ptr<Stream>& stream) {
                       return end(call, *stream, graph);
                     });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return with_stream(__func__, handle,
                     [&](const Call& call, const std::shared_ptr<Stream>& stream) {
                       if (stream->legacy) {
                         if (const cudaError_t error = call.runtime.refuse_implicit(*stream))
                           return error;
                       }
                       *status = status_of(*stream);
                       return cudaSuccess;
                     });
}

// The graph and its nodes are not shown: nobody may edit a capture here.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  return with_stream(
      __func__, handle, [&](const Call& call, const std::shared_ptr<Stream>& stream) {
        if (graph != nullptr || dependencies != nullptr || edges != nullptr || count != nullptr) {
          return cudaErrorNotSupported;
        }
        if (stream->legacy) {
          if (const cudaError_t error = call.runtime.refuse_implicit(*stream)) return error;
        }
        *status = status_of(*stream);
        if (id != nullptr && stream->capture != nullptr) *id = stream->capture->id;
        return cudaSuccess;
      });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return api(__func__, Rule::question, [&](const Call& call) {
    if (*mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed) {
      return cudaErrorInvalidValue;
    }
    std::swap(*mode, call.thread.capture_mode);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const auto source = call.runtime.graphs.find(graph);
    if (source == nullptr || exec == nullptr || flags != 0) return cudaErrorInvalidValue;
    auto made = std::make_shared<GraphExec>();
    made->nodes = source->nodes;
    made->leaves = leaves_of(made->nodes);
    *exec = call.runtime.graph_execs.add(std::move(made));
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t handle, cudaStream_t) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    return call.runtime.graph_execs.find(handle) != nullptr ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
  return with_stream(__func__, on, [&](const Call& call, const std::shared_ptr<Stream>& stream) {
    const auto exec = call.runtime.graph_execs.find(handle);
    if (exec == nullptr) return cudaErrorInvalidValue;
    if (stream->capture != nullptr) return embed(*stream, *exec);
    if (stream->legacy) {
      if (const cudaError_t error = call.runtime.refuse_implicit(*stream)) return error;
    }
    call.runtime.post_graph(*stream, *exec);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    return call.runtime.graphs.remove(graph) != nullptr ? cudaSuccess : cudaErrorInvalidValue;
  });
}

// A launch that is under way goes on.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    return call.runtime.graph_execs.remove(exec) != nullptr ? cudaSuccess : cudaErrorInvalidValue;
  });
}

// Only the number of nodes: there is nothing to be done with one.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return api(__func__, Rule::usual, [&](const Call& call) {
    const auto found = call.runtime.graphs.find(graph);
    if (found == nullptr || count == nullptr) return cudaErrorInvalidValue;
    if (nodes != nullptr) return cudaErrorNotSupported;
    *count = found->nodes.size();
    return cudaSuccess;
  });
}
