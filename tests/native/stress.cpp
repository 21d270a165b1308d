// Runs named scenarios with ranks as threads of this process. Exit code 0: all held; 1: one did
// not; 2: wrong usage. A sanitizer adds its own.
//
//   stress --list
//   stress --scenario mixed --scenario fifo --seed 3 --seconds 2
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scenario.h"

namespace {

using namespace pycoll;
using namespace pycoll::stress;

constexpr const char* kUsage =
    "usage: stress [--list] [--scenario NAME]... [--seed N] [--seconds S]\n"
    "              [--patience S]\n"
    "Without --scenario all run, each for --seconds. An operation that takes longer than\n"
    "--patience has failed.\n";

Nanoseconds from_seconds(double seconds) {
  return std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(seconds));
}

std::vector<Scenario> all_scenarios() {
  std::vector<Scenario> all = transport_scenarios();
  for (const auto& more :
       {arena_scenarios(), network_scenarios(), tcp_scenarios(), collective_scenarios(),
        message_scenarios(), at_once_scenarios(), codec_scenarios(), failure_scenarios()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

struct Options {
  bool list = false;
  std::vector<std::string> names;
  uint64_t seed = 0;
  double seconds = 1;
  double patience = 20;
};

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--list") {
      options.list = true;
      continue;
    }
    if (i + 1 == argc) return std::nullopt;
    const std::string value = argv[++i];
    if (name == "--scenario") {
      options.names.push_back(value);
    } else if (name == "--seed") {
      options.seed = std::strtoull(value.c_str(), nullptr, 10);
    } else if (name == "--seconds") {
      options.seconds = std::strtod(value.c_str(), nullptr);
    } else if (name == "--patience") {
      options.patience = std::strtod(value.c_str(), nullptr);
    } else {
      return std::nullopt;
    }
  }
  return options;
}

bool run_one(const Scenario& scenario, const Options& options) {
  const Settings settings{options.seed, Deadline::after(from_seconds(options.seconds)),
                          from_seconds(options.patience)};
  const auto began = Clock::now();
  try {
    scenario.run(settings);
  } catch (const std::exception& error) {
    std::printf("FAILED %s, seed %llu: %s\n", scenario.name.c_str(),
                static_cast<unsigned long long>(options.seed), error.what());
    return false;
  }
  std::printf("ok %s, seed %llu, %.1f s\n", scenario.name.c_str(),
              static_cast<unsigned long long>(options.seed), to_seconds(Clock::now() - began));
  std::fflush(stdout);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const auto options = parse(argc, argv);
  if (!options) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  const std::vector<Scenario> scenarios = all_scenarios();
  if (options->list) {
    for (const Scenario& each : scenarios) {
      std::printf("%-28s %s\n", each.name.c_str(), each.summary.c_str());
    }
    return 0;
  }
  std::vector<Scenario> chosen;
  for (const std::string& name : options->names) {
    for (const Scenario& each : scenarios) {
      if (each.name == name) chosen.push_back(each);
    }
  }
  if (chosen.size() != options->names.size()) {
    std::fprintf(stderr, "a scenario has no such name; --list shows them\n%s", kUsage);
    return 2;
  }
  bool held = true;
  for (const Scenario& each : options->names.empty() ? scenarios : chosen) {
    held &= run_one(each, *options);
  }
  return held ? 0 : 1;
}
