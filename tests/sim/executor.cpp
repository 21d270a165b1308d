// Runs one scenario of the executor's own tests.
//
//   executor --list
//   executor NAME [SEED]      SEED 0, the default: round robin
//
// Exit code 0: what it checks held; 1: it did not; 2: wrong usage. A report of the executor or of a
// sanitizer has its own (sim/simt.h, tests/test_sim_executor.py).
#include <cstdio>
#include <cstdlib>

#include "scenario.h"

using namespace pycoll::sim::tests;

namespace {

std::vector<Scenario> all_scenarios() {
  std::vector<Scenario> all;
  for (const auto& some :
       {value_scenarios(), order_scenarios(), fault_scenarios(), schedule_scenarios()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

int run(const Scenario& scenario, const Settings& settings) {
  try {
    scenario.run(settings);
  } catch (const std::exception& error) {
    std::printf("FAILED %s: %s\n", scenario.name.c_str(), error.what());
    return 1;
  }
  std::printf("ok %s\n", scenario.name.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  Settings settings;
  if (argc > 2) settings.seed = std::strtoull(argv[2], nullptr, 10);
  for (const Scenario& each : all_scenarios()) {
    if (name == "--list") std::printf("%-36s %s\n", each.name.c_str(), each.summary.c_str());
    if (name == each.name) return run(each, settings);
  }
  if (name == "--list") return 0;
  std::fprintf(stderr, "usage: executor --list | NAME [SEED]\n");
  return 2;
}
