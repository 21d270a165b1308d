#include "sim/control.h"

#include "sim/cuda/runtime.h"

namespace pycoll::sim {
namespace {

// No call of the API: nothing is counted or refused.
template <class Body>
auto with_runtime(Body&& body) {
  const Quiet quiet;
  cuda::Runtime& runtime = cuda::Runtime::instance();
  const cuda::Lock lock(runtime.mutex);
  return body(runtime);
}

void change_gate(cudaStream_t handle, void (*change)(cuda::Gate&, cuda::Clock::time_point),
                 cuda::Clock::time_point time = {}) {
  with_runtime([&](cuda::Runtime& runtime) {
    const auto stream = runtime.stream(handle, cuda::this_thread());
    if (stream == nullptr) cuda::give_up("control: no such stream");
    change(*stream->gate, time);
    runtime.engine.wake();
  });
}

}  // namespace

void fail_call(const std::string& function, uint64_t calls_before, cudaError_t code) {
  with_runtime([&](cuda::Runtime& runtime) { runtime.faults.add(function, calls_before, code); });
}

void kill_at_call(const std::string& function, uint64_t calls_before) {
  with_runtime([&](cuda::Runtime& runtime) {
    runtime.faults.add(function, calls_before, cuda::Faults::kKill);
  });
}

void clear_faults() {
  with_runtime([](cuda::Runtime& runtime) { runtime.faults.clear(); });
}

void poison_device(int device, cudaError_t code) {
  with_runtime([&](cuda::Runtime& runtime) {
    if (!runtime.is_device(device)) cuda::give_up("control: no such device");
    runtime.devices[device].poison = code;
    runtime.engine.wake();
  });
}

void hold_stream(cudaStream_t stream) {
  change_gate(stream, [](cuda::Gate& gate, cuda::Clock::time_point) { gate.held = true; });
}

void release_stream(cudaStream_t stream) {
  change_gate(stream, [](cuda::Gate& gate, cuda::Clock::time_point) { gate.held = false; });
}

void delay_stream(cudaStream_t stream, std::chrono::microseconds time) {
  change_gate(
      stream, [](cuda::Gate& gate, cuda::Clock::time_point until) { gate.not_before = until; },
      cuda::Clock::now() + time);
}

void set_peer_access(int device, int peer, bool possible) {
  with_runtime([&](cuda::Runtime& runtime) {
    if (!runtime.is_device(device) || !runtime.is_device(peer)) {
      cuda::give_up("control: no such device");
    }
    auto& impossible = runtime.devices[device].impossible_peers;
    possible ? static_cast<void>(impossible.erase(peer))
             : static_cast<void>(impossible.insert(peer));
  });
}

Counters counters() {
  return with_runtime([](cuda::Runtime& runtime) {
    Counters now = runtime.counters;
    for (const auto& [base, allocation] : runtime.memory.all()) {
      if (allocation.kind == cuda::MemoryKind::imported) ++now.imports;
      if (allocation.kind > cuda::MemoryKind::pool) continue;
      ++now.allocations;
      now.allocated_bytes += allocation.bytes;
    }
    for (const cuda::Device& device : runtime.devices) now.contexts += device.has_context ? 1 : 0;
    return now;
  });
}

}  // namespace pycoll::sim
