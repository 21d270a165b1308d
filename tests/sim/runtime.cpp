// Runs one scenario of the simulated CUDA runtime.
//
//   runtime --list
//   runtime NAME
//
// Exit code 0: what it checks held; 1: it did not; 2: wrong usage. Reports of the executor and of
// sanitizers have codes of their own (tests/test_sim_runtime.py). The environment sets the machine
// up (sim/control.h).
#include "runtime.h"

#include <cstdio>

using namespace pycoll::sim::tests;

namespace {

std::vector<RuntimeScenario> all_scenarios() {
  struct Group {
    const char* name;
    std::vector<RuntimeScenario> scenarios;
  };
  std::vector<RuntimeScenario> all;
  for (const Group& group : {Group{"memory", memory_scenarios()},
                             {"streams", stream_scenarios()},
                             {"graphs", graph_scenarios()},
                             {"errors", error_scenarios()},
                             {"driver", driver_scenarios()},
                             {"processes", process_scenarios()},
                             {"unordered", races(false)},
                             {"ordered", races(true)}}) {
    for (RuntimeScenario each : group.scenarios) {
      each.name = std::string(group.name) + "/" + each.name;
      all.push_back(std::move(each));
    }
  }
  return all;
}

int run(const RuntimeScenario& scenario) {
  try {
    scenario.run();
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
  for (const RuntimeScenario& each : all_scenarios()) {
    if (name == "--list") std::printf("%-36s %s\n", each.name.c_str(), each.summary.c_str());
    if (name == each.name) return run(each);
  }
  if (name == "--list") return 0;
  std::fprintf(stderr, "usage: runtime --list | GROUP/NAME\n");
  return 2;
}
