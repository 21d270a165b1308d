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

#include <string>

namespace pycoll::torch_adapter {

// Installs the allocator, and lets this thread's large CPU tensors come from the arena until as
// many leave_shareable() were called.
void enter_shareable();
void leave_shareable() noexcept;

// Installs it for all threads, for ever.
void serve_everywhere();

// An uninitialised contiguous tensor in the arena; in ordinary memory when there is no room there.
at::Tensor empty_shareable(at::IntArrayRef sizes, at::ScalarType dtype);

// Moves the tensor's storage into the arena, for all tensors on that storage; leaves it where it is
// when there is no room. Says why when it cannot be moved: other devices and layouts, and memory
// that somebody outside of torch may point to. Empty: it was done.
std::string share(const at::Tensor& tensor);

}  // namespace pycoll::torch_adapter
