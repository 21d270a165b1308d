// Which instruction set runs: asked of the CPU, never assumed from the build machine.
#include "kernels/codec.h"
#include "kernels/cpu/codec_table.h"
#include "kernels/cpu/fused_table.h"
#include "kernels/cpu/reduce_table.h"
#include "kernels/fused.h"
#include "kernels/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pycoll {
namespace {

// __builtin_cpu_supports also checks that the operating system saves the wider registers.
#if defined(__x86_64__)
bool has_f16c() {
  // clang does not know "f16c" by name.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool runs_avx2() {
  // Asked once: every operation looks up its kernels, and CPUID leaves a virtual machine, which
  // costs microseconds. __builtin_cpu_supports reads memory.
  static const bool f16c = has_f16c();
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool runs_avx2() {
  return false;
}
bool runs_avx512() {
  return false;
}
#endif

bool runs_always() {
  return true;
}

struct IsaRow {
  std::string_view name;
  const ReduceTable* reduce;
  const CodecKernels* codec;
  const FusedKernels* fused;
  bool (*runs_here)();
};

constexpr IsaRow kIsas[] = {
    {"baseline", &reduce_table_baseline, &codec_kernels_baseline, &fused_kernels_baseline,
     runs_always},
    {"avx2", &reduce_table_avx2, &codec_kernels_avx2, &fused_kernels_avx2, runs_avx2},
    {"avx512", &reduce_table_avx512, &codec_kernels_avx512, &fused_kernels_avx512, runs_avx512},
};
constexpr int kIsaCount = static_cast<int>(Isa::kCount);
static_assert(sizeof(kIsas) / sizeof(kIsas[0]) == kIsaCount, "one row an Isa, in its order");

const IsaRow* row_of(Isa isa) {
  const int index = static_cast<int>(isa);
  return index >= 0 && index < kIsaCount ? &kIsas[index] : nullptr;
}

}  // namespace

std::string_view name_of(Isa isa) {
  const IsaRow* row = row_of(isa);
  return row ? row->name : "unknown";
}

bool isa_available(Isa isa) {
  const IsaRow* row = row_of(isa);
  return row && row->runs_here();
}

Isa best_isa() {
  int best = kIsaCount - 1;
  while (best > 0 && !kIsas[best].runs_here()) {
    --best;
  }
  return static_cast<Isa>(best);
}

const ReduceKernels* find_reduce_kernels(DType dtype, ReduceOp op, Isa isa) {
  if (dtype >= DType::kCount || op >= ReduceOp::kCount || !isa_available(isa)) {
    return nullptr;
  }
  return kIsas[static_cast<int>(isa)].reduce->entry[static_cast<int>(dtype)][static_cast<int>(op)];
}

const CodecKernels& codec_kernels(Isa isa) {
  return *kIsas[static_cast<int>(isa)].codec;
}

const FusedKernels& fused_kernels(Isa isa) {
  return *kIsas[static_cast<int>(isa)].fused;
}

}  // namespace pycoll
