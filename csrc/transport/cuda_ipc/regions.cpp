#include "transport/cuda_ipc/regions.h"

#include "core/error.h"

namespace pycoll::cuda {
namespace {

// CUDA gives small allocations parts of one, and a handle means all of it.
constexpr size_t kWhole = size_t{2} << 20;

// Plain data, as exchanged.
struct Offer {
  cudaIpcMemHandle_t handle{};
  uint64_t offset = 0;                                       // in the allocation that it means
  const std::shared_ptr<DeviceMemory>* neighbour = nullptr;  // for ranks of the same process
};

// What is said where memory cannot be shared: by containers that do not see each other's processes,
// parts of one GPU (MIG), virtual machines, devices that do not reach each other after all.
void require_sharing(cudaError_t error, const std::string& what) {
  switch (error) {
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorOperatingSystem:
    case cudaErrorPeerAccessUnsupported:
      cudaGetLastError();
      fail(ErrorKind::not_implemented, describe(error, what));
    default:
      require(error, what);
  }
}

void enable_access(int peer_device) {
  int device = 0;
  require(cudaGetDevice(&device), "cudaGetDevice");
  if (device == peer_device) return;
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer_device, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  require_sharing(error, concat("cudaDeviceEnablePeerAccess(", peer_device, ")"));
}

int ordinal_of(const DeviceIdentity& identity) {
  int ordinal = 0;
  require(cudaDeviceGetByPCIBusId(&ordinal, identity.bus_id), "cudaDeviceGetByPCIBusId");
  return ordinal;
}

}  // namespace

ImportedMemory::ImportedMemory(const cudaIpcMemHandle_t& handle) {
  void* base = nullptr;
  require_sharing(cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess),
                  "cudaIpcOpenMemHandle");
  base_.reset(static_cast<std::byte*>(base));
}

Regions::Regions(const Meeting& meeting, const Peers& peers, const Driver& driver, size_t bytes) {
  const bool alone = peers.world_size() == 1;
  Offer mine;
  meeting.together("making memory for its peers", [&] {
    own_ = std::make_shared<DeviceMemory>((bytes + kWhole - 1) / kWhole * kWhole);
    // On a stream of its own: the default one may be ordered with a stream that is captured.
    const Stream stream;
    require(cudaMemsetAsync(own_->data(), 0, own_->size(), stream.get()), "cudaMemsetAsync");
    require(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    mine.neighbour = &own_;
    if (alone) return;
    require_sharing(cudaIpcGetMemHandle(&mine.handle, own_->data()), "cudaIpcGetMemHandle");
    mine.offset = static_cast<uint64_t>(own_->data() - driver.base_of(own_->data()));
  });
  const std::vector<Offer> offers = meeting.exchange(mine);
  // Until everybody is through, own_ stays where the neighbours find it.
  meeting.together("mapping the memory of its peers", [&] {
    for (int rank = 0; rank < peers.world_size(); ++rank) {
      const Offer& offer = offers[static_cast<size_t>(rank)];
      if (rank == peers.rank) {
        region_.push_back(own_->data());
      } else if (peers.in_this_process(rank)) {
        enable_access(ordinal_of(peers.of(rank)));
        neighbours_.push_back(*offer.neighbour);
        region_.push_back(neighbours_.back()->data());
      } else {
        imports_.emplace_back(offer.handle);
        region_.push_back(imports_.back().base() + offer.offset);
      }
    }
  });
}

}  // namespace pycoll::cuda
