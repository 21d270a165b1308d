#include "sim/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#include "sim/context_switch.h"
#include "sim/sanitizers.h"

namespace pycoll::sim {
namespace {

constexpr size_t kStacksInSlab = 64;
constexpr size_t kPage = 4096;
// A guard page splits a mapping in two, and a process has 65,530 of them by default: beyond that
// many stacks overflows go into the neighbour.
constexpr size_t kGuardedSlabs = 8192 / kStacksInSlab;

// Those that were given up in the middle have left AddressSanitizer's marks.
void forget_frames(const Stack& stack) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stack.base, stack.size);
}

}  // namespace

StackPool::StackPool(size_t stack_bytes)
    : stack_bytes_((stack_bytes + kPage - 1) / kPage * kPage) {}

StackPool::~StackPool() {
  for (const Stack& slab : slabs_) {
    forget_frames(slab);
    ::munmap(slab.base, slab.size);
  }
}

Stack StackPool::take() {
  if (free_.empty()) grow();
  const Stack stack = free_.back();
  free_.pop_back();
  return stack;
}

void StackPool::give_back(Stack stack) {
  forget_frames(stack);
  // The next fiber here does not come after this one. A new mapping is how ThreadSanitizer learns
  // that its locals are not this one's.
  if (under_tsan()) {
    ::mmap(stack.base, stack.size, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  free_.push_back(stack);
}

void StackPool::grow() {
  const size_t step = kPage + stack_bytes_;
  void* slab = ::mmap(nullptr, kStacksInSlab * step, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (slab == MAP_FAILED) throw std::bad_alloc();
  auto* base = static_cast<std::byte*>(slab);
  slabs_.push_back({base, kStacksInSlab * step});
  for (size_t i = kStacksInSlab; i-- > 0;) {
    std::byte* guard = base + i * step;
    if (slabs_.size() <= kGuardedSlabs) ::mprotect(guard, kPage, PROT_NONE);
    free_.push_back({guard + kPage, stack_bytes_});
  }
}

FiberFactory::FiberFactory() : root_(under_tsan() ? __tsan_create_fiber(0) : nullptr) {}

FiberFactory::~FiberFactory() {
  if (root_ != nullptr) __tsan_destroy_fiber(root_);
}

void* FiberFactory::make() const {
  if (root_ == nullptr) return nullptr;
  void* const caller = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(root_, kNoOrder);
  void* const fiber = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(caller, kNoOrder);
  return fiber;
}

Fiber::Fiber(Stack stack, void (*entry)(), const FiberFactory& factory)
    : stack_(stack),
      stack_pointer_(make_context(stack.base + stack.size, entry)),
      tsan_(factory.make()) {}

Fiber::~Fiber() {
  if (tsan_ != nullptr) __tsan_destroy_fiber(tsan_);
}

void Home::begin() {
  if (under_tsan()) tsan_ = __tsan_get_current_fiber();
}

void Home::resume(Fiber& fiber) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&fake_stack_, fiber.stack_.base, fiber.stack_.size);
  }
  if (under_tsan()) __tsan_switch_to_fiber(fiber.tsan_, kNoOrder);
  pycoll_sim_switch(&stack_pointer_, fiber.stack_pointer_);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
  }
}

void Home::arrived() {
  if (__sanitizer_finish_switch_fiber == nullptr) return;
  const void* base = nullptr;
  __sanitizer_finish_switch_fiber(nullptr, &base, &stack_.size);
  stack_.base = static_cast<std::byte*>(const_cast<void*>(base));
}

void Home::leave(Fiber& fiber) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&fiber.fake_stack_, stack_.base, stack_.size);
  }
  if (under_tsan()) __tsan_switch_to_fiber(tsan_, kNoOrder);
  pycoll_sim_switch(&fiber.stack_pointer_, stack_pointer_);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fiber.fake_stack_, nullptr, nullptr);
  }
}

void Home::leave_for_good(Fiber& fiber) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(nullptr, stack_.base, stack_.size);
  }
  if (under_tsan()) __tsan_switch_to_fiber(tsan_, kNoOrder);
  pycoll_sim_switch(&fiber.stack_pointer_, stack_pointer_);
  std::abort();  // nobody resumes it
}

}  // namespace pycoll::sim
