// Stacks that an OS thread switches between.
#pragma once

#include <cstddef>
#include <vector>

namespace pycoll::sim {

struct Stack {
  std::byte* base = nullptr;  // the lowest byte
  size_t size = 0;
};

// Stacks of one size; those given back are used again.
class StackPool {
 public:
  explicit StackPool(size_t stack_bytes);
  ~StackPool();  // all of them, in use or not
  StackPool(const StackPool&) = delete;

  Stack take();
  void give_back(Stack stack);

 private:
  void grow();

  size_t stack_bytes_;
  std::vector<Stack> free_;
  std::vector<Stack> slabs_;
};

// Makes fibers for ThreadSanitizer that have seen nothing of what the calling thread did since the
// factory was made: that blocks are started by one OS thread orders nothing between them.
class FiberFactory {
 public:
  FiberFactory();
  ~FiberFactory();
  FiberFactory(const FiberFactory&) = delete;

  void* make() const;  // null without ThreadSanitizer

 private:
  void* root_;
};

class Home;

class Fiber {
 public:
  // Will call entry() on `stack` when it is first resumed; that must end in Home::leave_for_good.
  Fiber(Stack stack, void (*entry)(), const FiberFactory& factory);
  ~Fiber();
  Fiber(const Fiber&) = delete;

  const Stack& stack() const { return stack_; }

 private:
  friend class Home;

  Stack stack_;
  void* stack_pointer_;
  void* tsan_;
  void* fake_stack_ = nullptr;  // of AddressSanitizer
};

// The OS thread's own stack, between which and the fibers control goes back and forth.
class Home {
 public:
  void begin();  // before resuming: notes who the caller is

  void resume(Fiber& fiber);

  // ---- Inside a fiber. ----

  void arrived();  // first thing in its entry function
  void leave(Fiber& fiber);
  [[noreturn]] void leave_for_good(Fiber& fiber);

 private:
  void* stack_pointer_ = nullptr;
  void* tsan_ = nullptr;
  void* fake_stack_ = nullptr;
  Stack stack_;  // as AddressSanitizer knows it
};

}  // namespace pycoll::sim
