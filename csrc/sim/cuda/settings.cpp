#include "sim/cuda/settings.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>

#include "sim/simt.h"

namespace pycoll::sim::cuda {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? std::nullopt : std::optional<std::string>(text);
}

template <class Number>
void read_number(const char* name, Number& value) {
  const auto text = variable(name);
  if (!text) return;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc{} || stop != end)
    give_up(std::string(name) + "=" + *text + " is no number");
}

// As CUDA does: the list ends at the first entry that is no device.
std::vector<int> visible(const std::string& list, int count) {
  std::vector<int> devices;
  std::istringstream entries(list);
  for (std::string entry; std::getline(entries, entry, ',');) {
    int device = -1;
    std::from_chars(entry.data(), entry.data() + entry.size(), device);
    if (device < 0 || device >= count) break;
    if (std::find(devices.begin(), devices.end(), device) != devices.end()) return {};
    devices.push_back(device);
  }
  return devices;
}

}  // namespace

void give_up(const std::string& why) {
  std::fprintf(stderr, "simulated CUDA runtime: %s\n", why.c_str());
  std::fflush(stderr);
  ::_exit(kFailureExitCode);
}

Settings Settings::from_env() {
  Settings settings;
  int count = 8;
  read_number("PYCOLL_SIM_DEVICES", count);
  if (count < 0 || count > 64) give_up("PYCOLL_SIM_DEVICES must be 0 to 64");
  for (int device = 0; device < count; ++device) settings.devices.push_back(device);
  if (const auto list = variable("CUDA_VISIBLE_DEVICES")) settings.devices = visible(*list, count);
  size_t megabytes = settings.memory_bytes >> 20;
  read_number("PYCOLL_SIM_MEMORY_MB", megabytes);
  settings.memory_bytes = megabytes << 20;
  settings.seeded = variable("PYCOLL_SIM_SEED").has_value();
  read_number("PYCOLL_SIM_SEED", settings.seed);
  read_number("PYCOLL_SIM_RESIDENT", settings.resident);
  read_number("PYCOLL_SIM_TIMEOUT_S", settings.timeout_s);
  settings.faults = variable("PYCOLL_SIM_FAULTS").value_or("");
  if (variable("PYCOLL_SIM_TIME_SLICE").value_or("0") != "0") {
    settings.slice_file = variable("PYCOLL_SIM_SLICE_FILE").value_or("");
    if (settings.slice_file.empty()) {
      give_up("PYCOLL_SIM_TIME_SLICE needs PYCOLL_SIM_SLICE_FILE, a file that all ranks can open");
    }
  }
  return settings;
}

}  // namespace pycoll::sim::cuda
