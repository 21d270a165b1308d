// The machine's part of switching stacks.
#pragma once

namespace pycoll::sim {

// Saves what a call must preserve on the current stack, stores the stack pointer in *save, and
// continues where the context with stack pointer `load` was saved. Rounding modes are not part of a
// context.
extern "C" void pycoll_sim_switch(void** save, void* load);

// A context that will call entry(), which must not return, on the stack that ends at `top`.
void* make_context(void* top, void (*entry)());

}  // namespace pycoll::sim
