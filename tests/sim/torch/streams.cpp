// The device guard: devices, streams, events.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "device.h"

namespace pycoll::simgpu {
namespace {

constexpr size_t kMaxDevices = 64;
thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};

c10::Stream make_stream(c10::DeviceIndex device, int priority) {
  const DeviceScope scope(device);
  cudaStream_t stream = nullptr;
  SIMGPU_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSimGpu, device),
                     reinterpret_cast<c10::StreamId>(stream));
}

// A few streams for each device and priority, handed out in turn, as torch does for CUDA: so two
// users may come to share one, which must do no harm.
class Pool {
 public:
  c10::Stream next(c10::DeviceIndex device, bool high_priority) {
    const std::lock_guard lock(mutex_);
    Streams& streams = streams_[{device, high_priority}];
    const size_t turn = streams.turn++ % kSize;
    if (streams.made.size() <= turn) {
      int least = 0, greatest = 0;
      SIMGPU_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
      streams.made.push_back(make_stream(device, high_priority ? greatest : least));
    }
    return streams.made[turn];
  }

  size_t high_priority_streams() {
    const std::lock_guard lock(mutex_);
    size_t count = 0;
    for (const auto& [key, streams] : streams_) count += key.second ? streams.made.size() : 0;
    return count;
  }

 private:
  static constexpr size_t kSize = 8;
  struct Streams {
    std::vector<c10::Stream> made;
    size_t turn = 0;
  };
  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, bool>, Streams> streams_;
};

Pool& pool() {
  static auto* const all = new Pool;  // like torch's: streams live as long as the process
  return *all;
}

cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSimGpu; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSimGpu, current_device()}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kSimGpu, "not a simgpu device: ", device);
    if (device.has_index()) SIMGPU_CHECK(cudaSetDevice(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) cudaSetDevice(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
    return static_cast<c10::DeviceIndex>(std::min<int>(count, kMaxDevices));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const DeviceScope scope(device);
    SIMGPU_CHECK(cudaDeviceSynchronize());
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return pool().next(device.has_index() ? device.index() : current_device(), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return make_stream(device.has_index() ? device.index() : current_device(), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    const DeviceScope scope(stream.device_index());
    return is_done(cudaStreamQuery(handle_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const DeviceScope scope(stream.device_index());
    SIMGPU_CHECK(cudaStreamSynchronize(handle_of(stream)));
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    const DeviceScope scope(stream.device_index());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    SIMGPU_CHECK(cudaStreamIsCapturing(handle_of(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of device ", device,
                " on a stream of device ", stream.device_index());
    const DeviceScope scope(stream.device_index());
    auto made = event_of(*event);
    if (made == nullptr) {
      const unsigned flags =
          flag == c10::EventFlag::BACKEND_DEFAULT ? cudaEventDefault : cudaEventDisableTiming;
      SIMGPU_CHECK(cudaEventCreateWithFlags(&made, flags));
      *event = made;
    }
    SIMGPU_CHECK(cudaEventRecord(made, handle_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const DeviceScope scope(stream.device_index());
    SIMGPU_CHECK(cudaStreamWaitEvent(handle_of(stream), event_of(event), 0));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_done(cudaEventQuery(event_of(event)));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) SIMGPU_CHECK(cudaEventSynchronize(event_of(event)));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex device) const override {
    const DeviceScope scope(device);
    float milliseconds = 0;
    SIMGPU_CHECK(cudaEventElapsedTime(&milliseconds, event_of(from), event_of(to)));
    return milliseconds;
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    if (event != nullptr) cudaEventDestroy(event_of(event));
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream);
  }

 private:
  static bool is_done(cudaError_t state) {
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // an answer, not an error
      return false;
    }
    check(state, "query");
    return true;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

void check(cudaError_t error, const char* call) {
  TORCH_CHECK(error == cudaSuccess, "simgpu: ", call, ": ", cudaGetErrorName(error), ": ",
              cudaGetErrorString(error));
}

c10::DeviceIndex current_device() {
  int device = 0;
  SIMGPU_CHECK(cudaGetDevice(&device));
  return static_cast<c10::DeviceIndex>(device);
}

DeviceScope::DeviceScope(c10::DeviceIndex device) {
  SIMGPU_CHECK(cudaGetDevice(&before_));
  if (device != before_) SIMGPU_CHECK(cudaSetDevice(device));
}

DeviceScope::~DeviceScope() {
  cudaSetDevice(before_);
}

size_t high_priority_streams() {
  return pool().high_priority_streams();
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSimGpu, device), current_streams.at(device));
}

}  // namespace pycoll::simgpu
