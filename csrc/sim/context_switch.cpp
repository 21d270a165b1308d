#include "sim/context_switch.h"

// No other header: this file is compiled for machines that we have no library of.
using Word = __UINTPTR_TYPE__;

namespace pycoll::sim {

#if defined(__x86_64__)

// System V: rbx, rbp and r12 to r15 are the callee's to preserve. The address that ret takes is
// part of the context.
asm(R"(
  .text
  .globl pycoll_sim_switch
  .hidden pycoll_sim_switch
  .type pycoll_sim_switch, @function
pycoll_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size pycoll_sim_switch, .-pycoll_sim_switch
)");

namespace {
constexpr int kContextWords = 8;  // six registers, the address, and the frame above, which is none
constexpr int kAddress = 6;
}  // namespace

#elif defined(__aarch64__)

// AAPCS64: x19 to x28, the frame pointer x29, the link register x30 and the lower halves of v8 to
// v15.
asm(R"(
  .text
  .globl pycoll_sim_switch
  .hidden pycoll_sim_switch
  .type pycoll_sim_switch, %function
pycoll_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size pycoll_sim_switch, .-pycoll_sim_switch
)");

namespace {
constexpr int kContextWords = 20;
constexpr int kAddress = 11;
}  // namespace

#else
#error "the SIMT executor needs the context switch of this machine"
#endif

void* make_context(void* top, void (*entry)()) {
  // A multiple of 16, as both ABIs want; on x86-64 entry then begins as if called, 8 below one. All
  // registers are 0, the frame pointer too, so that who walks the stack stops there.
  Word* words = reinterpret_cast<Word*>(reinterpret_cast<Word>(top) & ~Word{15}) - kContextWords;
  for (int i = 0; i < kContextWords; ++i) words[i] = 0;
  words[kAddress] = reinterpret_cast<Word>(entry);
  return words;
}

}  // namespace pycoll::sim
