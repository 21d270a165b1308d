// What libpycoll_cuda.so exports.
#include "core/error.h"
#include "kernels/cuda/kernels.h"
#include "runtime/device/fused.h"
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

// Makes the group of this host's ranks, where there are several hosts.
using OpenHere = HostsGroup::OpenHere;

std::unique_ptr<CudaGroup> make(GroupSeed seed, const OpenHere& open_here) {
  const std::optional<Geometry> geometry = geometry_of(seed.peers, seed.control->config());
  if (seed.peers.path == Path::shared_device) {
    return std::make_unique<SharedDeviceGroup>(std::move(seed));
  }
  if (seed.peers.path == Path::peers && geometry) {
    return std::make_unique<PeerGroup>(std::move(seed), *geometry);
  }
  if (seed.peers.path == Path::hosts) {
    return std::make_unique<HostsGroup>(std::move(seed), open_here);
  }
  return std::make_unique<StagedGroup>(std::move(seed));
}

// Whatever fails on one rank fails on all: nobody is left waiting for who is not there.
std::shared_ptr<DeviceGroup> connected(const Meeting& meeting, GroupSeed seed,
                                       const OpenHere& open_here) {
  std::unique_ptr<CudaGroup> group;
  meeting.together("taking what a group needs", [&] { group = make(std::move(seed), open_here); });
  group->connect();
  return CudaGroup::shared(std::move(group));
}

// Anything else is found by the launcher, too, but it does not say what.
void check_memory(const void* p, uint64_t alignment, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % alignment == 0) return;
  fail(ErrorKind::invalid_argument, what, " at ", p, " on a GPU is not aligned to ", alignment,
       " bytes: make a copy that is");
}
void check_values(DType dtype, const void* values) {
  if (!can_encode(dtype)) {
    fail(ErrorKind::invalid_argument, "codecs take float32, float16 and bfloat16, not ",
         name_of(dtype));
  }
  check_memory(values, size_of(dtype), "an array of values");
}

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
    const Meeting meeting = meeting_of(control, device);
    std::optional<DeviceGuard> guard;
    meeting.together("choosing the GPU", [&] { guard.emplace(device); });
    const RelaxedCapture relaxed;  // another stream may be under capture
    GroupSeed seed{control, device, find_peers(meeting, device)};
    const auto open_here = [&](const std::shared_ptr<Communicator>& here) {
      return open(here, device);
    };
    try {
      return connected(meeting, seed, open_here);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::not_implemented) throw;
    }
    // Processes cannot share the memory of these GPUs: all ranks have come here.
    seed.peers.path = Path::staged;
    return connected(meeting, std::move(seed), open_here);
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

  void encode(const EncodeRequest& request, int device, void* stream) const override {
    check_codec(request.codec);
    check_values(request.dtype, request.values);
    check_memory(request.code, kCodeAlignment, "a code");
    check_memory(request.residual, sizeof(float), "a residual");
    EncodeManyCall call{request.codec, request.key, request.dtype};
    call.vectors = 1;
    call.vector[0] = {request.values, request.count, request.code, request.residual};
    const DeviceGuard guard(device);
    require(encode_many(call, static_cast<cudaStream_t>(stream)), "launch of an encoder");
  }

  void decode(const DecodeRequest& request, int device, void* stream) const override {
    check_codec(request.codec);
    check_values(request.dtype, request.values);
    if (request.code_count < 1 || request.code_count > kMaxCodes) {
      fail(ErrorKind::invalid_argument, request.code_count,
           " codes are to be summed on a GPU; 1 to ", kMaxCodes, " can be");
    }
    DecodeManyCall call{request.codec, request.dtype, request.divisor};
    call.vectors = 1;
    call.vector[0] = {request.values, request.count};
    call.codes = static_cast<int32_t>(request.code_count);
    for (size_t i = 0; i < request.code_count; ++i) {
      check_memory(request.codes[i], kCodeAlignment, "a code");
      call.code[i] = request.codes[i];
    }
    const DeviceGuard guard(device);
    require(decode_many(call, static_cast<cudaStream_t>(stream)), "launch of a decoder");
  }

  void cast(const CastList& list, float scale, const FusedPlace& place) const override {
    cuda::cast(list, scale, place);
  }
  void unscale(const TensorList& list, const DeviceFactor& factor, double* sum_of_squares,
               const FusedPlace& place) const override {
    cuda::unscale(list, factor, sum_of_squares, place);
  }
  void multiply(const TensorList& list, const DeviceFactor& factor,
                const FusedPlace& place) const override {
    cuda::multiply(list, factor, place);
  }
  void clip(const TensorList& list, const double* sum_of_squares, double max_norm,
            const FusedPlace& place) const override {
    cuda::clip(list, sum_of_squares, max_norm, place);
  }
};

}  // namespace
}  // namespace pycoll::cuda

extern "C" __attribute__((visibility("default"))) pycoll::DeviceLibrary* pycoll_device_library(
    int interface_version) {
  if (interface_version != pycoll::kDeviceInterfaceVersion) return nullptr;
  return new pycoll::cuda::Library();
}
