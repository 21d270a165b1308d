#include "world.h"

#include <algorithm>

#include "group_views.h"
#include "kernels/cuda/program_image.h"
#include "program/algorithm.h"

namespace pycoll::gpu_tests {
namespace {

struct Event {
  explicit Event(unsigned flags) {
    cudaEvent_t made = nullptr;
    require(cudaEventCreateWithFlags(&made, flags), "cudaEventCreateWithFlags");
    event.reset(made);
  }
  std::unique_ptr<CUevent_st, Freed<cudaEventDestroy>> event;
};

}  // namespace

Memory::Memory(size_t bytes) {
  void* p = nullptr;
  require(cudaMalloc(&p, std::max<size_t>(bytes, 1)), concat("cudaMalloc of ", bytes, " bytes"));
  memory_.reset(p);
  require(cudaMemset(p, 0, bytes), "cudaMemset");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

cuda::Geometry largest_geometry(int ranks) {
  int multiprocessors = 0;
  require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0),
          "cudaDeviceGetAttribute");
  const int room = std::max(multiprocessors / ranks, 1);
  cuda::Geometry geometry;
  geometry.world_size = ranks;
  geometry.message_fifos = 1;
  geometry.blocks = std::min(geometry.blocks, room);
  while (geometry.fifos > 4 && cuda::grid_limits(geometry).collective > room) --geometry.fifos;
  return geometry;
}

World::World(int ranks, const cuda::Geometry& geometry) : ranks_(ranks), found_inf_(sizeof(float)) {
  if (ranks < 1 || ranks > cuda::kMaxRanks) throw std::invalid_argument("RANKS is 1 to 16");
  const cuda::RegionLayout layout(geometry);
  const auto count = static_cast<size_t>(ranks);
  void* words = nullptr;
  require(cudaHostAlloc(&words, count * sizeof(cuda::HostWords), cudaHostAllocMapped),
          "cudaHostAlloc");
  hosts_.reset(static_cast<cuda::HostWords*>(words));
  std::vector<std::byte*> regions;
  for (size_t rank = 0; rank < count; ++rank) {
    regions_.emplace_back(layout.bytes);
    regions.push_back(regions_.back().as<std::byte>());
    hosts_.get()[rank] = {};
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    streams_.emplace_back(stream);
  }
  views_ = tests::views_of(geometry, regions, hosts_.get());
}

cuda::Call World::next_call() {
  cuda::Call call;
  call.sequence = ++sequence_;
  // A graph's call has the number of its capture, at every replay and on every rank.
  call.fingerprint = 0x5eed;
  call.collective = static_cast<uint32_t>(Collective::all_reduce);
  call.timeout_ns = uint64_t{30} * 1000 * 1000 * 1000;
  return call;
}

void World::resize(uint64_t count, DType dtype) {
  count_ = count;
  dtype_ = dtype;
  inputs_.clear();
  outputs_.clear();
  for (int rank = 0; rank < ranks_; ++rank) {
    inputs_.emplace_back(count * size_of(dtype));
    outputs_.emplace_back(count * size_of(dtype));
  }
  code_ = Memory(2 * count + 64);  // sixteen bits a value at most, and what is padded
}

void World::clear_found_inf() {
  const float zero = 0;
  write(found_inf(), &zero, sizeof(zero));
}

const World::Loaded& World::program(const std::string& algorithm, int rank) {
  const auto found = programs_.find({algorithm, rank});
  if (found != programs_.end()) return found->second;
  for (int r = 0; r < ranks_; ++r) {
    cuda::ProgramImage image =
        cuda::compile(build_program(algorithm, {Collective::all_reduce, r, ranks_, 0, {}}));
    const size_t bytes = image.steps.size() * sizeof(cuda::ProgramStep);
    Memory steps(bytes);
    write(steps.as<void>(), image.steps.data(), bytes);
    programs_.emplace(std::pair(algorithm, r), Loaded{std::move(image), std::move(steps)});
  }
  return programs_.at({algorithm, rank});
}

void World::write(void* to, const void* from, size_t bytes) const {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

std::vector<std::byte> World::read(const void* from, size_t bytes) const {
  std::vector<std::byte> memory(bytes);
  require(cudaMemcpy(memory.data(), from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  return memory;
}

void World::synchronize() const {
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int rank = 0; rank < ranks_; ++rank) {
    const cuda::ErrorRecord& error = hosts_.get()[rank].error;
    if (error.trouble == 0) continue;
    throw std::runtime_error(concat("rank ", rank, " gave up (", error.trouble, ") in block ",
                                    error.block, ", step ", error.step, ": rank ", error.peer,
                                    " is at ", error.seen, ", not ", error.expected));
  }
}

double World::seconds(const std::function<void()>& launch) const {
  const Event begin(cudaEventDefault), end(cudaEventDefault);
  require(cudaEventRecord(begin.event.get(), stream(0)), "cudaEventRecord");
  for (int rank = 1; rank < ranks_; ++rank) {
    require(cudaStreamWaitEvent(stream(rank), begin.event.get(), 0), "cudaStreamWaitEvent");
  }
  launch();
  for (int rank = 1; rank < ranks_; ++rank) {
    const Event joined(cudaEventDisableTiming);
    require(cudaEventRecord(joined.event.get(), stream(rank)), "cudaEventRecord");
    require(cudaStreamWaitEvent(stream(0), joined.event.get(), 0), "cudaStreamWaitEvent");
  }
  require(cudaEventRecord(end.event.get(), stream(0)), "cudaEventRecord");
  synchronize();
  float milliseconds = 0;
  require(cudaEventElapsedTime(&milliseconds, begin.event.get(), end.event.get()),
          "cudaEventElapsedTime");
  return std::max(double{milliseconds}, 1e-6) / 1e3;
}

Graphs::Graphs(const World& world, const std::function<void()>& launch) : world_(world) {
  for (int rank = 0; rank < world.ranks(); ++rank) {
    require(cudaStreamBeginCapture(world.stream(rank), cudaStreamCaptureModeThreadLocal),
            "cudaStreamBeginCapture");
  }
  launch();
  for (int rank = 0; rank < world.ranks(); ++rank) {
    cudaGraph_t captured = nullptr;
    require(cudaStreamEndCapture(world.stream(rank), &captured), "cudaStreamEndCapture");
    const std::unique_ptr<CUgraph_st, Freed<cudaGraphDestroy>> graph(captured);
    cudaGraphExec_t made = nullptr;
    require(cudaGraphInstantiate(&made, captured, 0), "cudaGraphInstantiate");
    graphs_.emplace_back(made);
  }
}

void Graphs::launch() const {
  for (size_t rank = 0; rank < graphs_.size(); ++rank) {
    require(cudaGraphLaunch(graphs_[rank].get(), world_.stream(static_cast<int>(rank))),
            "cudaGraphLaunch");
  }
}

}  // namespace pycoll::gpu_tests
