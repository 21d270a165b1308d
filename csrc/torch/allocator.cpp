#include "torch/allocator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>

#include "core/error.h"
#include "transport/shm/arena.h"

namespace pycoll::torch_adapter {
namespace {

// In a scope, all that is worth a block of its own: below, staging costs next to nothing. For a
// whole program only what torch would get from mmap, and fault in, anew each time.
constexpr size_t kLeastInScope = size_t{64} << 10;
constexpr size_t kLeastEverywhere = size_t{1} << 20;

// The thread's own count, null while it has entered no scope. A plain pointer, because threads
// allocate while their other variables are being destroyed. Autograd runs the backward pass of CPU
// tensors on the thread that asks for it.
thread_local const ScopeCount* scopes = nullptr;

// Keeps the count for the thread, which may end while a scope of its own is still open.
struct ScopesOfThread {
  ScopesOfThread() { scopes = count.get(); }
  ~ScopesOfThread() { scopes = nullptr; }
  ScopesOfThread(const ScopesOfThread&) = delete;
  ScopesOfThread& operator=(const ScopesOfThread&) = delete;
  const std::shared_ptr<ScopeCount> count = std::make_shared<ScopeCount>();
};

bool in_scope() noexcept {
  // Relaxed: memory from either allocator is right at any time.
  return scopes != nullptr && scopes->open.load(std::memory_order_relaxed) > 0;
}

void release(void* context);

class ShareableAllocator final : public c10::Allocator {
 public:
  // `other` serves what this one does not.
  ShareableAllocator(c10::Allocator* other, bool always)
      : other_(other), other_deleter_(other->raw_deleter()), always_(always) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= least()) {
      const auto arena = shm::process_arena();
      if (void* const block = arena ? arena->allocate(bytes) : nullptr) {
        c10::profiledCPUMemoryReporter().New(block, bytes);
        return {block, block, &release, at::Device(at::kCPU)};
      }
    }
    c10::DataPtr data = other_->allocate(bytes);
    // raw_deleter() must be the deleter of all memory from here, so release() stands before the
    // other's. It fails for an empty block, which nobody deletes.
    if (other_deleter_ != nullptr) (void)data.compare_exchange_deleter(other_deleter_, &release);
    return data;
  }

  // None where the other has none: its memory cannot be freed by the pointer alone.
  c10::DeleterFnPtr raw_deleter() const override {
    return other_deleter_ == nullptr ? nullptr : &release;
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  void serve_everywhere() { everywhere_.store(true, std::memory_order_relaxed); }
  void free_other(void* context) const { other_deleter_(context); }

 private:
  size_t least() const {
    if (always_) return 1;
    if (in_scope()) return kLeastInScope;
    // Relaxed, as in in_scope().
    return everywhere_.load(std::memory_order_relaxed) ? kLeastEverywhere : SIZE_MAX;
  }

  c10::Allocator* const other_;
  const c10::DeleterFnPtr other_deleter_;
  const bool always_;
  std::atomic<bool> everywhere_{false};
};

struct Allocators {
  explicit Allocators(c10::Allocator* other) : scoped(other, false), always(other, true) {
    // What a program installed with a priority is wrapped like torch's own, so ours may replace it.
    c10::SetCPUAllocator(&scoped, UINT8_MAX);
  }
  ShareableAllocator scoped;
  ShareableAllocator always;
};

// An allocator is process-wide by nature, and its deleter is a plain function: this is how both
// find the objects. Never destroyed.
Allocators& allocators() {
  static auto* const both = new Allocators(c10::GetCPUAllocator());
  return *both;
}

// The one deleter of all memory that the two hand out; runs on any thread, also while the
// interpreter ends, and in forked children, where the arena ignores it.
void release(void* context) {
  shm::Arena* const arena = shm::existing_process_arena();
  if (arena != nullptr && arena->owns(context)) {
    c10::profiledCPUMemoryReporter().Delete(context);
    arena->free(context);
  } else {
    allocators().scoped.free_other(context);
  }
}

}  // namespace

std::shared_ptr<ScopeCount> enter_shareable() {
  allocators();
  thread_local const ScopesOfThread mine;
  mine.count->open.fetch_add(1, std::memory_order_relaxed);
  return mine.count;
}

void leave_shareable(const std::shared_ptr<ScopeCount>& entered) noexcept {
  entered->open.fetch_sub(1, std::memory_order_relaxed);
}

void serve_everywhere() {
  allocators().scoped.serve_everywhere();
}

at::Tensor empty_shareable(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, &allocators().always,
                                   c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
}

std::string share(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    return "the tensor has no storage of its own (it is sparse, nested or wrapped)";
  }
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (!tensor.device().is_cpu() || !storage->device().is_cpu()) {
    return concat("the tensor is on ", tensor.device().str(), ", not in the CPU's memory");
  }
  const size_t bytes = storage->nbytes();
  if (bytes == 0) return "";
  // A copy-on-write storage gets memory of its own first: the others keep what they share.
  const void* const old = storage->mutable_data();
  const auto arena = shm::process_arena();
  if (!arena || arena->offset_of(old, bytes)) return "";
  if (!storage->resizable()) {
    return "the tensor's memory cannot be moved, because it came from or was given to NumPy, a "
           "file, another process or another library";
  }
  c10::DataPtr moved = allocators().always.allocate(bytes);
  if (!arena->owns(moved.get())) return "";
  std::memcpy(moved.get(), old, bytes);
  storage->set_data_ptr_noswap(std::move(moved));
  storage->set_allocator(&allocators().always);
  return "";
}

}  // namespace pycoll::torch_adapter
