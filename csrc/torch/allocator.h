// torch's CPU memory in the process's arena, for those who ask for it: peers read and write it in
// place, and a collective on it copies nothing.
//
// Two allocators, made at first use and never destroyed, because tensors that they made are freed
// while the interpreter ends. The first takes the place of torch's CPU allocator and serves large
// blocks from the arena to threads that are in a scope (or to all, once serve_everywhere() was
// called); what it does not serve, it gets from the allocator that was there before. The second
// serves every size, for tensors that are made shareable one by one.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>

namespace pycoll::torch_adapter {

// How many scopes a thread is in.
struct ScopeCount {
  std::atomic<int> open{0};
};

// Installs the allocator, and lets this thread's large CPU tensors come from the arena until
// leave_shareable() was called for what this returns, once for each call. Any thread may do that: a
// generator that is suspended in a scope is closed by whoever drops it.
std::shared_ptr<ScopeCount> enter_shareable();
void leave_shareable(const std::shared_ptr<ScopeCount>& entered) noexcept;

// Installs it for all threads, for ever.
void serve_everywhere();

// An uninitialised contiguous tensor in the arena; in ordinary memory when there is no room there.
at::Tensor empty_shareable(at::IntArrayRef sizes, at::ScalarType dtype);

// Moves the tensor's storage into the arena, for all tensors on that storage; leaves it where it is
// when there is no room. Says why when it cannot be moved: other devices and layouts, and memory
// that somebody outside of torch may point to. Empty: it was done.
std::string share(const at::Tensor& tensor);

}  // namespace pycoll::torch_adapter
