// All memory that the runtime knows: of devices, of other processes, pinned.
//
// Each allocation is a mapping of its own between two inaccessible pages, filled with 0xff bytes
// (NaN in every floating-point type), and is known to the byte: copies are checked against its
// size, and under AddressSanitizer kernels are too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <memory>

#include "core/fd.h"
#include "sim/cuda/shared_file.h"

namespace pycoll::sim::cuda {

enum class MemoryKind : uint8_t {
  device,
  pool,        // cudaMallocAsync: cannot be exported
  imported,    // of another process
  pinned,      // cudaHostAlloc
  registered,  // cudaHostRegister: the caller's own
};

struct Allocation {
  std::byte* base = nullptr;
  size_t bytes = 0;
  MemoryKind kind = MemoryKind::device;
  int device = 0;
  unsigned flags = 0;    // of pinned and registered memory
  SharedFile file;       // device
  FileName imported_as;  // imported
  unsigned opened = 0;   // imported: how often
  uint64_t id = 0;       // never used again, as addresses are
  bool freed = false;    // pool: freed in stream order, which may be later
  Mapping mapping;       // with the guard pages

  Allocation() = default;
  Allocation(Allocation&&) = default;
  ~Allocation();

  bool on_device() const { return kind <= MemoryKind::imported; }
};

class Memory {
 public:
  // Null: no memory, or no such file.
  Allocation* allocate_device(size_t bytes, int device, MemoryKind kind);
  Allocation* allocate_pinned(size_t bytes, unsigned flags);
  Allocation* add_registered(void* base, size_t bytes, unsigned flags);
  Allocation* import(const FileName& name, size_t bytes, int device);

  Allocation* find(const void* inside);
  Allocation* find_base(const void* base);
  Allocation* find_import(const FileName& name);
  // Whether a byte of the range is in an allocation.
  bool overlaps(const void* base, size_t bytes);
  void release(Allocation* allocation);

  size_t device_bytes(int device) const;  // what this process has allocated there
  const std::map<std::byte*, Allocation>& all() const { return allocations_; }

 private:
  Allocation* add(Allocation allocation);

  uint64_t last_id_ = 0;
  std::map<std::byte*, Allocation> allocations_;  // by address
};

}  // namespace pycoll::sim::cuda
