// Runs a suite of the device kernels on the executor, against references of the CPU.
//
//   device_kernels --list
//   device_kernels SUITE CASES [SEED]      SEED 0, the default: round robin
//
// Exit code 0: all as it must be; 1: not; 2: wrong usage. Reports of the executor and of sanitizers
// have their own.
#include <cstdio>
#include <cstdlib>

#include "device_scenarios.h"

using namespace pycoll::sim::tests;

std::vector<Suite> pycoll::sim::tests::device_suites() {
  return {
      {"all_reduce", "hand-made all_reduce: LL, one-shot, two-shot", all_reduce_suite},
      {"programs", "Programs of every collective by the executor kernel", program_suite},
      {"sweep", "every size by each kernel that runs Programs", sweep_suite},
      {"covering", "every pair of size, type and number of ranks, by all of them in turns",
       covering_suite},
      {"replay", "both as graphs that are replayed, among eager calls", replay_suite},
      {"barriers", "what was done before a barrier is seen after it", barrier_suite},
      {"messages", "batches of send and recv beside collectives", message_suite},
      {"shared_device", "ranks that share a GPU, all types and operations", shared_device_suite},
      {"cast", "cast, scale and look for inf or NaN", cast_suite},
      {"scale", "PREMUL_SUM's scaling", scale_suite},
      {"fused", "lists of tensors: casts, unscaling with the norm, clipping", fused_suite},
      {"encode", "codes of every codec, and residuals", encode_suite},
      {"decode", "sums of codes of every codec", decode_suite},
      {"choices", "which kernel a group chooses", choice_suite},
      {"failures", "late peers, aborts and mismatches", failure_suite},
  };
}

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const bool lists = name == "--list";
  for (const Suite& suite : device_suites()) {
    if (lists) std::printf("%-16s %s\n", suite.name.c_str(), suite.summary.c_str());
    if (name != suite.name || argc < 3) continue;
    Settings settings;
    settings.seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
    try {
      const uint64_t done = suite.run(settings, std::strtoull(argv[2], nullptr, 10));
      std::printf("ok %s: %llu cases\n", name.c_str(), static_cast<unsigned long long>(done));
      return 0;
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", name.c_str(), error.what());
      return 1;
    }
  }
  if (lists) return 0;
  std::fprintf(stderr, "usage: device_kernels --list | SUITE CASES [SEED]\n");
  return 2;
}
