// What libpycoll_cuda.so exports.
#include "core/error.h"
#include "runtime/device/peer_group.h"
#include "runtime/device/shared_device_group.h"
#include "runtime/device/staged_group.h"

#ifndef PYCOLL_DEVICE_LIBRARY_NAME
#define PYCOLL_DEVICE_LIBRARY_NAME "cuda"
#endif

namespace pycoll::cuda {
namespace {

class Library final : public DeviceLibrary {
 public:
  const char* name() const override { return PYCOLL_DEVICE_LIBRARY_NAME; }

  int device_count() const override {
    int count = 0;
    // No driver, or no device.
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
  }

  std::shared_ptr<DeviceGroup> open(const std::shared_ptr<Communicator>& control,
                                    int device) override {
    const Meeting meeting = meeting_of(control);
    meeting.together("choosing the GPU", [&] { const DeviceGuard guard(device); });
    const DeviceGuard guard(device);
    GroupSeed seed{control, device, find_peers(meeting, device)};
    const std::optional<Geometry> geometry = geometry_of(seed.peers, control->config());
    if (seed.peers.path == Path::shared_device) {
      return std::make_shared<SharedDeviceGroup>(std::move(seed));
    }
    if (seed.peers.path == Path::peers && geometry) {
      return std::make_shared<PeerGroup>(std::move(seed), *geometry);
    }
    return std::make_shared<StagedGroup>(std::move(seed));
  }
};

}  // namespace
}  // namespace pycoll::cuda

extern "C" __attribute__((visibility("default"))) pycoll::DeviceLibrary* pycoll_device_library(
    int interface_version) {
  if (interface_version != pycoll::kDeviceInterfaceVersion) return nullptr;
  return new pycoll::cuda::Library();
}
