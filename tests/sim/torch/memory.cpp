#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

namespace pycoll::simgpu {
namespace {

// What a block's bytes become when it is freed: whole words of it are far from any value of a test.
constexpr int kPoison = 0xDB;

struct Block {
  void* address;
  c10::Stream allocated_on;
  std::vector<c10::Stream> used_on;
};

// Frees blocks in the order of streams: one stream a device, on which nothing else runs.
class Graveyard {
 public:
  void bury(const Block& block, size_t bytes) {
    const c10::DeviceIndex device = block.allocated_on.device_index();
    const DeviceScope scope(device);
    const cudaStream_t grave = stream_of(device);
    wait_for(block.allocated_on, grave);
    for (const c10::Stream& stream : block.used_on) wait_for(stream, grave);
    // Errors have no one to go to: torch frees in destructors. A device that has failed keeps it.
    cudaMemsetAsync(block.address, kPoison, bytes, grave);
    cudaFreeAsync(block.address, grave);
  }

 private:
  static void wait_for(const c10::Stream& stream, cudaStream_t grave) {
    cudaEvent_t event = nullptr;
    if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return;
    cudaEventRecord(event, handle_of(stream));
    cudaStreamWaitEvent(grave, event, 0);
    cudaEventDestroy(event);
  }

  cudaStream_t stream_of(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    cudaStream_t& stream = streams_[device];
    if (stream == nullptr) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    return stream;
  }

  std::mutex mutex_;
  std::map<c10::DeviceIndex, cudaStream_t> streams_;
};

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = current_device();
    const c10::Device where(kSimGpu, device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, where};
    void* address = nullptr;
    SIMGPU_CHECK(cudaMalloc(&address, bytes));
    const std::lock_guard lock(mutex_);
    blocks_.emplace(address, Entry{{address, current_stream(device), {}}, bytes});
    return {address, address, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const cudaStream_t stream = handle_of(current_stream(current_device()));
    SIMGPU_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

  void record(void* address, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end() || found->second.block.allocated_on == stream) return;
    auto& streams = found->second.block.used_on;
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }

 private:
  struct Entry {
    Block block;
    size_t bytes;
  };
  static void free_block(void* address) {
    if (address != nullptr) static_cast<DeviceAllocator&>(device_allocator()).free(address);
  }
  void free(void* address) {
    std::unique_lock lock(mutex_);
    const auto node = blocks_.extract(address);
    lock.unlock();
    TORCH_INTERNAL_ASSERT(!node.empty(), "freed twice, or never allocated");
    graveyard_.bury(node.mapped().block, node.mapped().bytes);
  }

  std::mutex mutex_;
  std::map<void*, Entry> blocks_;  // by address
  Graveyard graveyard_;
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    SIMGPU_CHECK(cudaHostAlloc(&address, bytes, cudaHostAllocDefault));
    return {address, address, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void free_block(void* address) { cudaFreeHost(address); }
};

}  // namespace

// torch keeps pointers to them for ever, and frees tensors until the very end of the process: so
// they are never destroyed.
c10::Allocator& device_allocator() {
  static auto* const allocator = new DeviceAllocator;
  return *allocator;
}

c10::Allocator& pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

void record_use(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get() == nullptr || data.get_deleter() != device_allocator().raw_deleter()) return;
  static_cast<DeviceAllocator&>(device_allocator()).record(data.get_context(), stream);
}

bool is_pinned(const void* address) {
  cudaPointerAttributes attributes{};
  return cudaPointerGetAttributes(&attributes, address) == cudaSuccess &&
         attributes.type == cudaMemoryTypeHost;
}

}  // namespace pycoll::simgpu
