// One region of device memory a rank, mapped by all ranks of the group.
#pragma once

#include <memory>
#include <vector>

#include "transport/cuda_ipc/driver.h"
#include "transport/cuda_ipc/identity.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {

// Memory of another process. Opening the same memory again counts, and so does closing it. Throws
// Error(not_implemented) where processes cannot share memory of these devices at all.
class ImportedMemory {
 public:
  ImportedMemory() = default;
  explicit ImportedMemory(const cudaIpcMemHandle_t& handle);
  std::byte* base() const { return base_.get(); }

 private:
  std::unique_ptr<std::byte, Freed<cudaIpcCloseMemHandle>> base_;
};

class Regions {
 public:
  // Collective, on the current device: all ranks come back, or all throw. Zeroed, aligned to 256.
  Regions(const Meeting& meeting, const Peers& peers, const Driver& driver, size_t bytes);

  // Rank r's, as this rank maps it. Memory of a rank that has ended stays until this goes.
  std::byte* of(int rank) const { return region_[static_cast<size_t>(rank)]; }
  int world_size() const { return static_cast<int>(region_.size()); }

 private:
  // Ranks of one process share it: whoever goes last frees it.
  std::shared_ptr<DeviceMemory> own_;
  std::vector<std::shared_ptr<DeviceMemory>> neighbours_;
  std::vector<ImportedMemory> imports_;
  std::vector<std::byte*> region_;
};

}  // namespace pycoll::cuda
