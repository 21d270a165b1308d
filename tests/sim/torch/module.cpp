// Loads the device, and lets tests reach into the machine that it is simulated on.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <string>

#include "device.h"
#include "sim/control.h"

namespace py = pybind11;

namespace pycoll::simgpu {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return deviceCount() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? static_cast<c10::DeviceIndex>(count) : 0;
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    SIMGPU_CHECK(cudaSetDevice(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    if (device >= 0) SIMGPU_CHECK(cudaSetDevice(device));
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Device getDeviceFromPtr(void* address) const override {
    cudaPointerAttributes attributes{};
    SIMGPU_CHECK(cudaPointerGetAttributes(&attributes, address));
    TORCH_CHECK(attributes.type == cudaMemoryTypeDevice, "not the memory of a simgpu device");
    return {kSimGpu, static_cast<c10::DeviceIndex>(attributes.device)};
  }
};

// Streams by their id: torch.Stream.stream_id. Id 0 is that of the current device.
cudaStream_t stream_of(int64_t id) {
  return reinterpret_cast<cudaStream_t>(id);
}

py::dict counters() {
  const sim::Counters now = sim::counters();
  py::dict all;
  all["launches"] = now.launches;
  all["copies"] = now.copies;
  all["host_functions"] = now.host_functions;
  all["allocations"] = now.allocations;
  all["allocated_bytes"] = now.allocated_bytes;
  all["imports"] = now.imports;
  all["spins_across_processes"] = now.spins_across_processes;
  return all;
}

// A graph of what was captured; as a number, for Python.
int64_t end_capture(int64_t stream) {
  cudaGraph_t graph = nullptr;
  SIMGPU_CHECK(cudaStreamEndCapture(stream_of(stream), &graph));
  cudaGraphExec_t executable = nullptr;
  SIMGPU_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  SIMGPU_CHECK(cudaGraphDestroy(graph));
  return reinterpret_cast<int64_t>(executable);
}

PYBIND11_MODULE(simgpu_device, m) {
  m.doc() = "The torch device 'simgpu', on the simulated CUDA runtime.";
  c10::SetAllocator(kSimGpu, &device_allocator());
  static Hooks hooks;  // torch keeps the pointer
  at::RegisterPrivateUse1HooksInterface(&hooks);

  m.def("device_count", [] { return hooks.deviceCount(); });
  m.def("current_device", &current_device);
  m.def("set_device", [](int device) { SIMGPU_CHECK(cudaSetDevice(device)); });

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def(
      "hold_stream", [](int64_t id) { sim::hold_stream(stream_of(id)); }, unlocked);
  m.def(
      "release_stream", [](int64_t id) { sim::release_stream(stream_of(id)); }, unlocked);
  m.def("delay_stream",
        [](int64_t id, std::chrono::microseconds time) { sim::delay_stream(stream_of(id), time); });
  m.def("stream_priority", [](int64_t id) {
    int priority = 0;
    SIMGPU_CHECK(cudaStreamGetPriority(stream_of(id), &priority));
    return priority;
  });
  m.def("begin_capture", [](int64_t stream) {
    SIMGPU_CHECK(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeGlobal));
  });
  m.def("end_capture", &end_capture);
  m.def("launch_graph", [](int64_t graph, int64_t stream) {
    SIMGPU_CHECK(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(graph), stream_of(stream)));
  });
  m.def("high_priority_streams", &high_priority_streams);
  m.def("fail_call", [](const std::string& function, uint64_t calls_before, int code) {
    sim::fail_call(function, calls_before, static_cast<cudaError_t>(code));
  });
  m.def("poison_device",
        [](int device, int code) { sim::poison_device(device, static_cast<cudaError_t>(code)); });
  m.def("counters", &counters);
}

}  // namespace
}  // namespace pycoll::simgpu
