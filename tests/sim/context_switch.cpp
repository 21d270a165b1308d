// Two contexts that hand control to each other, with more values alive than registers: what a
// switch does not preserve shows in the results. Without any library, so that it runs wherever the
// machine's instructions can be emulated. Exit code 0: all held.
#include "sim/context_switch.h"

using namespace pycoll::sim;

namespace {

constexpr int kTurns = 1000;

void* home;
void* fiber;
alignas(16) char stack[1 << 16];
bool fiber_held, fiber_aligned;

// Sums that depend on every turn; `turn` is called in the middle of each with all of them alive.
struct Sums {
  long a, b, c, d, e, f;
  double p, q, r, s, t, u, v, w;
  bool operator==(const Sums&) const = default;
};

template <class Turn>
__attribute__((noinline)) Sums compute(long seed, Turn turn) {
  long a = seed, b = seed + 1, c = seed + 2, d = seed + 3, e = seed + 4, f = seed + 5;
  double p = 1, q = 2, r = 3, s = 4, t = 5, u = 6, v = 7, w = static_cast<double>(seed);
  for (int i = 0; i < kTurns; ++i) {
    turn();
    a = a * 3 + i;
    b ^= a + i;
    c = c * 5 + b;
    d ^= c;
    e += d * 7;
    f ^= e + a;
    p += 1.25 * i;
    q = q * 0.5 + p;
    r += q;
    s = s * 0.25 + r;
    t += s;
    u = u * 0.125 + t;
    v += u;
    w = w * 0.5 + v;
  }
  return {a, b, c, d, e, f, p, q, r, s, t, u, v, w};
}

void run_fiber() {
  // Both ABIs align the stack to 16, and the compiler takes their word for it; asm makes it look.
  alignas(16) char local[16];
  const char* place = local;
  asm volatile("" : "+r"(place));
  fiber_aligned = reinterpret_cast<__UINTPTR_TYPE__>(place) % 16 == 0;
  const auto turn = [] { pycoll_sim_switch(&fiber, home); };
  fiber_held = compute(77, turn) == compute(77, [] {});
  for (;;) turn();
}

}  // namespace

extern "C" int context_switch_main() {
  fiber = make_context(stack + sizeof(stack), run_fiber);
  const auto turn = [] { pycoll_sim_switch(&home, fiber); };
  const bool held = compute(5, turn) == compute(5, [] {});
  turn();  // the last of its turns
  return held && fiber_held && fiber_aligned ? 0 : 1;
}

// The system begins here, with a stack and nothing else.
#if defined(__x86_64__)
asm(R"(
  .globl _start
_start:
  call context_switch_main
  movl %eax, %edi
  movl $60, %eax
  syscall
)");
#elif defined(__aarch64__)
asm(R"(
  .globl _start
_start:
  bl context_switch_main
  mov x8, #93
  svc #0
)");
#endif
