#include "device_group.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "sim/cuda/enqueue.h"

namespace pycoll::sim {

// The whole CUDA runtime of these tests.
cudaError_t enqueue_kernel(cudaStream_t stream, const device::LaunchShape& shape,
                           std::function<void()> body, const void* /*function*/) {
  Grid grid;
  grid.grid = shape.grid;
  grid.block = shape.block;
  grid.shared_bytes = shape.shared_bytes;
  grid.body = std::move(body);
  if (!why_invalid(grid).empty()) return cudaErrorInvalidConfiguration;
  tests::StreamAccess::enqueue(stream, std::move(grid));
  return cudaSuccess;
}

}  // namespace pycoll::sim

namespace pycoll::sim::tests {

void DeviceGroup::Free::operator()(std::byte* p) const {
  std::free(p);
}

DeviceGroup::DeviceGroup(const cuda::Geometry& geometry, const Options& options, uint32_t counters)
    : geometry_(geometry), options_(options), hosts_(static_cast<size_t>(geometry.world_size)) {
  const cuda::RegionLayout layout(geometry);
  std::vector<std::byte*> regions;
  for (int32_t rank = 0; rank < geometry.world_size; ++rank) {
    auto* region = static_cast<std::byte*>(std::aligned_alloc(256, layout.bytes));
    if (region == nullptr) throw std::bad_alloc();
    std::memset(region, 0, layout.bytes);
    regions_.emplace_back(region);
    regions.push_back(region);
  }
  views_ = pycoll::tests::views_of(geometry, regions, hosts_.data());
  for (int32_t rank = 0; rank < geometry.world_size; ++rank) preset(rank, counters);
  for (int32_t rank = 0; rank < geometry.world_size; ++rank) {
    streams_.push_back({this, rank, {}, std::make_unique<Timeline>()});
  }
}

DeviceGroup::~DeviceGroup() = default;

void DeviceGroup::preset(int32_t rank, uint32_t counters) {
  const cuda::RegionLayout& layout = view(rank).layout;
  std::byte* region = regions_[static_cast<size_t>(rank)].get();
  const auto fill32 = [&](uint64_t from, size_t count) {
    for (size_t i = 0; i < count; ++i) std::memcpy(region + from + i * 4, &counters, 4);
  };
  const auto fill64 = [&](uint64_t from, size_t count) {
    const uint64_t wide = counters;
    for (size_t i = 0; i < count; ++i) std::memcpy(region + from + i * 8, &wide, 8);
  };
  const auto world = static_cast<size_t>(geometry_.world_size);
  const size_t ends = world * static_cast<size_t>(geometry_.all_fifos());
  const auto blocks = static_cast<size_t>(geometry_.blocks);
  for (const uint64_t array : {layout.sent, layout.received, layout.credits}) fill32(array, ends);
  for (const uint64_t array : {layout.barriers, layout.window_rounds, layout.packet_rounds}) {
    fill32(array, blocks);
  }
  fill32(layout.packet_credits, blocks * world);
  fill64(layout.arrivals, blocks * world);
  fill64(layout.message_flags, ends * static_cast<size_t>(geometry_.depth));
}

cudaStream_t DeviceGroup::stream(int32_t rank) {
  return reinterpret_cast<cudaStream_t>(&streams_[static_cast<size_t>(rank)]);
}

void StreamAccess::enqueue(cudaStream_t handle, Grid grid) {
  auto& stream = *reinterpret_cast<DeviceGroup::Stream*>(handle);
  grid.device = stream.group->shared_ ? 0 : stream.rank;
  grid.timeline = stream.timeline.get();
  stream.waiting.push_back(std::move(grid));
}

DeviceGroup::Graph DeviceGroup::capture() {
  Graph graph;
  for (Stream& stream : streams_) graph.push_back(std::exchange(stream.waiting, {}));
  return graph;
}

void DeviceGroup::launch(const Graph& graph) {
  for (size_t rank = 0; rank < graph.size(); ++rank) {
    auto& waiting = streams_[rank].waiting;
    waiting.insert(waiting.end(), graph[rank].begin(), graph[rank].end());
  }
}

void DeviceGroup::launch_next(Executor& executor, Stream& stream) {
  if (stream.waiting.empty()) return;
  Grid grid = std::move(stream.waiting.front());
  stream.waiting.pop_front();
  grid.done = [this, &executor, &stream] { launch_next(executor, stream); };
  executor.launch(std::move(grid));
}

// The host comes before what it launches, and after what it has waited for. Between enter and leave
// nothing may be touched that belongs to the host.
Stats DeviceGroup::run() {
  char began = 0, ended = 0;
  signal(&began);
  Executor executor(options_);
  for (Stream& stream : streams_) {
    Timeline* const timeline = stream.timeline.get();
    timeline->enter();
    wait(&began);
    timeline->leave();
    launch_next(executor, stream);
  }
  const Stats stats = executor.run();
  for (Stream& stream : streams_) {
    Timeline* const timeline = stream.timeline.get();
    timeline->enter();
    signal(&ended);
    timeline->leave();
  }
  wait(&ended);
  return stats;
}

}  // namespace pycoll::sim::tests
