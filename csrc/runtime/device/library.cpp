// What libpycoll_cuda.so exports.
#include "core/error.h"
#include "runtime/device/hosts_group.h"
#include "runtime/device/peer_group.h"
#include "runtime/device/shared_device_group.h"
#include "runtime/device/staged_group.h"

#ifndef PYCOLL_DEVICE_LIBRARY_NAME
#define PYCOLL_DEVICE_LIBRARY_NAME "cuda"
#endif

namespace pycoll::cuda {
namespace {

class Mark final : public DeviceMark {
 public:
  Mark(int device, cudaStream_t stream) : device_(device) {
    const DeviceGuard guard(device);
    event_.emplace();
    const cudaError_t error = cudaEventRecord(event_->get(), stream);
    if (error == cudaErrorInvalidResourceHandle) {
      cudaGetLastError();
      fail(ErrorKind::invalid_argument, "the stream ", stream, " is not one of GPU ", device,
           ", where the arrays of the call are");
    }
    require(error, "cudaEventRecord");
  }

  bool reached() const override {
    const cudaError_t state = cudaEventQuery(event_->get());
    if (state == cudaErrorNotReady) return false;
    require(state, "cudaEventQuery");
    return true;
  }
  void hold(void* stream) const override {
    const DeviceGuard guard(device_);  // whose default streams are meant
    require(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_->get()),
            "cudaStreamWaitEvent");
  }

 private:
  const int device_;
  std::optional<Event> event_;  // made while the device is current
};

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
    if (seed.peers.path == Path::hosts) {
      const auto inside = [&](const std::shared_ptr<Communicator>& here) {
        return open(here, device);
      };
      return std::make_shared<HostsGroup>(std::move(seed), inside);
    }
    return std::make_shared<StagedGroup>(std::move(seed));
  }

  std::optional<int> device_of(const void* address) const override {
    cudaPointerAttributes attributes{};
    require(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
    switch (attributes.type) {
      case cudaMemoryTypeDevice:
      case cudaMemoryTypeManaged:
        return attributes.device;
      case cudaMemoryTypeHost:
        return std::nullopt;
      default:
        fail(ErrorKind::invalid_argument, "the memory at ", address, " is none that a GPU reaches");
    }
  }

  int current_device() const override {
    int device = 0;
    require(cudaGetDevice(&device), "cudaGetDevice");
    return device;
  }

  std::shared_ptr<DeviceMark> mark(int device, void* stream) const override {
    return std::make_shared<Mark>(device, static_cast<cudaStream_t>(stream));
  }
};

}  // namespace
}  // namespace pycoll::cuda

extern "C" __attribute__((visibility("default"))) pycoll::DeviceLibrary* pycoll_device_library(
    int interface_version) {
  if (interface_version != pycoll::kDeviceInterfaceVersion) return nullptr;
  return new pycoll::cuda::Library();
}
