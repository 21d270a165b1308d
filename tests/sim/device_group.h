// A group of ranks on GPUs that do not exist: its memory, its streams, and the executor that runs
// what the launchers of kernels/cuda/kernels.h put on them. No CUDA runtime, not even a fake one.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <memory>
#include <vector>

#include "gpu/group_views.h"
#include "kernels/cuda/kernels.h"
#include "sim/simt.h"
#include "sim/timeline.h"

namespace pycoll::sim::tests {

using pycoll::tests::small_geometry;

class DeviceGroup {
 public:
  // `counters`: what all counters of the group begin at, to see them wrap.
  DeviceGroup(const cuda::Geometry& geometry, const Options& options, uint32_t counters = 0);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;

  const cuda::GroupView& view(int32_t rank) const { return views_[static_cast<size_t>(rank)]; }
  cuda::HostWords& host(int32_t rank) { return hosts_[static_cast<size_t>(rank)]; }
  int32_t world_size() const { return geometry_.world_size; }
  const cuda::Geometry& geometry() const { return geometry_; }
  cudaStream_t stream(int32_t rank);

  // Ranks are on one GPU: kernels of different ranks run one after the other, in turns.
  void share_device() { shared_ = true; }

  // What was launched since the last run, taken off the streams, as a captured graph.
  using Graph = std::vector<std::deque<Grid>>;
  Graph capture();
  void launch(const Graph& graph);

  // Runs everything that was launched: each rank's kernels in order, ranks as far apart as their
  // protocols let them be.
  Stats run();

 private:
  friend class StreamAccess;
  struct Stream {
    DeviceGroup* group;
    int32_t rank;
    std::deque<Grid> waiting;
    std::unique_ptr<Timeline> timeline;
  };
  struct Free {
    void operator()(std::byte* p) const;
  };

  void preset(int32_t rank, uint32_t counters);
  void launch_next(Executor& executor, Stream& stream);

  cuda::Geometry geometry_;
  Options options_;
  bool shared_ = false;
  std::vector<std::unique_ptr<std::byte[], Free>> regions_;
  std::vector<cuda::HostWords> hosts_;
  std::vector<cuda::GroupView> views_;
  std::vector<Stream> streams_;
};

// Where launchers without a group go: one rank.
class StreamAccess {
 public:
  static void enqueue(cudaStream_t stream, Grid grid);
};

}  // namespace pycoll::sim::tests
