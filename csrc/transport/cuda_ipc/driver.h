// The functions of CUDA's driver API that are needed, by name: nothing links to libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

namespace pycoll::cuda {

// Something that a stream does to a word of memory. A wait ends when the word is `value`.
struct WordOperation {
  enum class Kind : uint8_t { wait32, write32, write64 };
  Kind kind;
  void* word;
  uint64_t value;
};
inline WordOperation wait_for(uint32_t* word, uint32_t value) {
  return {WordOperation::Kind::wait32, word, value};
}
inline WordOperation write(uint32_t* word, uint32_t value) {
  return {WordOperation::Kind::write32, word, value};
}
inline WordOperation write(uint64_t* word, uint64_t value) {
  return {WordOperation::Kind::write64, word, value};
}

class Driver {
 public:
  // Throws Error(system) where a function that every driver of interest has is missing.
  Driver();

  // Where the allocation that `p` points into begins.
  std::byte* base_of(const void* p) const;

  // An allocation of device memory. Memory that is freed and given out again at the same address
  // has another identity.
  struct Allocation {
    std::byte* base = nullptr;
    uint64_t bytes = 0;
    uint64_t identity = 0;
    bool can_be_shared = false;  // with other processes, by cudaIpcGetMemHandle
  };
  // nullopt: `p` points into none.
  std::optional<Allocation> find_allocation(const void* p) const;

  // In order. Writes come after all that is before them on the stream, for everybody who sees them.
  void enqueue(const std::vector<WordOperation>& operations, cudaStream_t stream) const;

 private:
  void enqueue_one(const WordOperation& operation, cudaStream_t stream) const;

  decltype(&cuMemGetAddressRange) range_ = nullptr;
  decltype(&cuStreamWaitValue32) wait_ = nullptr;
  decltype(&cuStreamWriteValue32) write_ = nullptr;
  decltype(&cuPointerGetAttribute) attribute_ = nullptr;
  decltype(&cuStreamWriteValue64) write64_ = nullptr;
  decltype(&cuStreamBatchMemOp) batch_ = nullptr;  // nullptr: one by one
};

}  // namespace pycoll::cuda
