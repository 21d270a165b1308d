// Ranks on one GPU, in one process: memory, a stream each, and the vectors of an all_reduce.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/program_image.h"

namespace pycoll::gpu_tests {

inline void require(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(what + ": " + cudaGetErrorString(error));
}

template <auto kFree>
struct Freed {
  template <class T>
  void operator()(T* p) const {
    kFree(p);
  }
};

// Zeroed.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }

 private:
  std::unique_ptr<void, Freed<cudaFree>> memory_;
};

// All blocks of all ranks are resident at a time, one on a multiprocessor.
cuda::Geometry largest_geometry(int ranks);

class World {
 public:
  World(int ranks, const cuda::Geometry& geometry);
  // What is under way reads and writes what goes here.
  ~World() { cudaDeviceSynchronize(); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int ranks() const { return ranks_; }
  const cuda::GroupView& view(int rank) const { return views_[static_cast<size_t>(rank)]; }
  cudaStream_t stream(int rank) const { return streams_[static_cast<size_t>(rank)].get(); }
  cuda::Arithmetic sum() const { return {dtype_, ReduceOp::sum, ranks_}; }
  // The same for all ranks of a call.
  cuda::Call next_call();

  // New vectors.
  void resize(uint64_t count, DType dtype = DType::float32);
  DType dtype() const { return dtype_; }
  // Of what the next calls work on: the beginning of the vectors.
  void set_count(uint64_t count) { count_ = count; }
  uint64_t count() const { return count_; }
  std::byte* input(int rank) const { return inputs_[static_cast<size_t>(rank)].as<std::byte>(); }
  std::byte* output(int rank) const { return outputs_[static_cast<size_t>(rank)].as<std::byte>(); }
  // Of rank 0's vector, by any codec.
  std::byte* code() const { return code_.as<std::byte>(); }
  float* found_inf() const { return found_inf_.as<float>(); }
  void clear_found_inf();

  struct Loaded {
    cuda::ProgramImage image;
    Memory steps;
  };
  // The first call for an algorithm waits for the GPU: no rank may be in a kernel that waits.
  const Loaded& program(const std::string& algorithm, int rank);

  void write(void* to, const void* from, size_t bytes) const;
  std::vector<std::byte> read(const void* from, size_t bytes) const;
  // Throws what CUDA or a kernel has to report.
  void synchronize() const;
  // From when the first of the ranks' streams begins to when all of them end.
  double seconds(const std::function<void()>& launch) const;

 private:
  using Stream = std::unique_ptr<CUstream_st, Freed<cudaStreamDestroy>>;

  const int ranks_;
  uint64_t count_ = 0;
  DType dtype_ = DType::float32;
  uint32_t sequence_ = 0;
  std::vector<Memory> regions_;
  std::unique_ptr<cuda::HostWords, Freed<cudaFreeHost>> hosts_;
  std::vector<cuda::GroupView> views_;
  std::vector<Stream> streams_;
  std::vector<Memory> inputs_, outputs_;
  Memory code_;
  Memory found_inf_;
  std::map<std::pair<std::string, int>, Loaded> programs_;
};

// What `launch` puts on the ranks' streams, as a graph a rank.
class Graphs {
 public:
  Graphs(const World& world, const std::function<void()>& launch);
  void launch() const;

 private:
  const World& world_;
  std::vector<std::unique_ptr<CUgraphExec_st, Freed<cudaGraphExecDestroy>>> graphs_;
};

}  // namespace pycoll::gpu_tests
