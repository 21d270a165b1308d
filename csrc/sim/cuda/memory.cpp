#include "sim/cuda/memory.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(void const volatile*, size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile*, size_t);
}

namespace pycoll::sim::cuda {
namespace {

constexpr size_t kPage = 4096;

size_t whole_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// Maps `bytes` of the file (or of nothing, for fd -1) between two pages that nobody can touch.
Mapping map_guarded(int fd, size_t bytes) {
  const size_t inner = whole_pages(bytes), outer = inner + 2 * kPage;
  void* reserved = ::mmap(nullptr, outer, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return {};
  Mapping mapping(reserved, outer);
  const int flags = MAP_SHARED | MAP_FIXED | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* base = mapping.data() + kPage;
  if (::mmap(base, inner, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED) return {};
  // The rest of the last page; whole guard pages need no shadow.
  if (__asan_poison_memory_region != nullptr) {
    __asan_poison_memory_region(static_cast<std::byte*>(base) + bytes, inner - bytes);
  }
  return mapping;
}

}  // namespace

Allocation::~Allocation() {
  // The next mapping at this address must not find it poisoned.
  if (mapping.data() != nullptr && __asan_unpoison_memory_region != nullptr) {
    __asan_unpoison_memory_region(mapping.data(), mapping.size());
  }
}

Allocation* Memory::add(Allocation allocation) {
  if (allocation.kind != MemoryKind::registered) {
    if (allocation.mapping.data() == nullptr) return nullptr;
    allocation.base = allocation.mapping.data() + kPage;
  }
  allocation.id = ++last_id_;
  std::byte* base = allocation.base;
  return &allocations_.emplace(base, std::move(allocation)).first->second;
}

Allocation* Memory::allocate_device(size_t bytes, int device, MemoryKind kind) {
  Allocation made;
  made.bytes = bytes;
  made.kind = kind;
  made.device = device;
  made.file = create_shared_file(whole_pages(bytes));
  if (!made.file.fd) return nullptr;
  made.mapping = map_guarded(made.file.fd.get(), bytes);
  Allocation* added = add(std::move(made));
  if (added != nullptr) std::memset(added->base, 0xff, bytes);
  return added;
}

Allocation* Memory::allocate_pinned(size_t bytes, unsigned flags) {
  Allocation made;
  made.bytes = bytes;
  made.kind = MemoryKind::pinned;
  made.flags = flags;
  made.mapping = map_guarded(-1, bytes);
  Allocation* added = add(std::move(made));
  if (added != nullptr) std::memset(added->base, 0xff, bytes);
  return added;
}

Allocation* Memory::add_registered(void* base, size_t bytes, unsigned flags) {
  Allocation made;
  made.base = static_cast<std::byte*>(base);
  made.bytes = bytes;
  made.kind = MemoryKind::registered;
  made.flags = flags;
  return add(std::move(made));
}

Allocation* Memory::import(const FileName& name, size_t bytes, int device) {
  const UniqueFd fd = open_shared_file(name);
  if (!fd) return nullptr;
  Allocation made;
  made.bytes = bytes;
  made.kind = MemoryKind::imported;
  made.device = device;
  made.imported_as = name;
  made.opened = 1;
  made.mapping = map_guarded(fd.get(), bytes);
  return add(std::move(made));
}

Allocation* Memory::find(const void* inside) {
  auto* address = const_cast<std::byte*>(static_cast<const std::byte*>(inside));
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return nullptr;
  Allocation& before = std::prev(next)->second;
  return address < before.base + before.bytes ? &before : nullptr;
}

Allocation* Memory::find_base(const void* base) {
  Allocation* found = find(base);
  return found != nullptr && found->base == base ? found : nullptr;
}

Allocation* Memory::find_import(const FileName& name) {
  for (auto& [base, allocation] : allocations_) {
    if (allocation.kind == MemoryKind::imported && allocation.imported_as.nonce == name.nonce) {
      return &allocation;
    }
  }
  return nullptr;
}

bool Memory::overlaps(const void* base, size_t bytes) {
  auto* address = const_cast<std::byte*>(static_cast<const std::byte*>(base));
  if (find(address) != nullptr) return true;
  const auto next = allocations_.lower_bound(address);
  return next != allocations_.end() && next->first < address + bytes;
}

void Memory::release(Allocation* allocation) {
  allocations_.erase(allocation->base);
}

size_t Memory::device_bytes(int device) const {
  size_t sum = 0;
  for (const auto& [base, allocation] : allocations_) {
    if (allocation.kind <= MemoryKind::pool && allocation.device == device) sum += allocation.bytes;
  }
  return sum;
}

}  // namespace pycoll::sim::cuda
