#include "core/cpus.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace pycoll {
namespace {

namespace fs = std::filesystem;

// The first `count` words of a file as positive numbers; none if one is something else ("max", -1).
std::optional<std::vector<double>> read_numbers(const fs::path& file, size_t count) {
  std::ifstream in(file);
  std::vector<double> numbers;
  for (std::string word; numbers.size() < count && in >> word;) {
    double number = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (error != std::errc() || end != word.data() + word.size() || !(number > 0)) return {};
    numbers.push_back(number);
  }
  if (numbers.size() < count) return {};
  return numbers;
}

std::optional<double> quota_v2(const fs::path& group) {
  const auto numbers = read_numbers(group / "cpu.max", 2);  // "200000 100000" or "max 100000"
  if (!numbers) return {};
  return (*numbers)[0] / (*numbers)[1];
}

std::optional<double> quota_v1(const fs::path& group) {
  const auto quota = read_numbers(group / "cpu.cfs_quota_us", 1);  // -1: none
  const auto period = read_numbers(group / "cpu.cfs_period_us", 1);
  if (!quota || !period) return {};
  return (*quota)[0] / (*period)[0];
}

using Quota = std::optional<double> (*)(const fs::path&);

// The group and all above it, as far as they are mounted: without a cgroup namespace a container
// sees the host's path, but at `mount` its own group.
std::optional<double> tightest(const fs::path& mount, fs::path group, Quota quota) {
  std::optional<double> least = quota(mount);
  group = group.relative_path();
  const bool outside = std::find(group.begin(), group.end(), "..") != group.end();
  for (; !outside && !group.empty(); group = group.parent_path()) {
    const std::optional<double> here = quota(mount / group);
    if (here) least = std::min(*here, least.value_or(*here));
  }
  return least;
}

bool lists(const std::string& controllers, const std::string& wanted) {
  std::istringstream in(controllers);
  for (std::string each; std::getline(in, each, ',');) {
    if (each == wanted) return true;
  }
  return false;
}

}  // namespace

std::optional<double> cgroup_cpus(const fs::path& root) {
  const fs::path mounts = root / "sys/fs/cgroup";
  std::optional<double> least;
  const auto look = [&](const fs::path& mount, const fs::path& group, Quota quota) {
    const std::optional<double> found = tightest(mount, group, quota);
    if (found) least = std::min(*found, least.value_or(*found));
  };
  std::ifstream in(root / "proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {  // "4:cpu,cpuacct:/a/b", v2: "0::/a/b"
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const fs::path group = line.substr(second + 1);
    if (controllers.empty()) {
      look(mounts, group, quota_v2);
      look(mounts / "unified", group, quota_v2);  // where version 1 has the place
    } else if (lists(controllers, "cpu")) {
      look(mounts / "cpu", group, quota_v1);
      look(mounts / controllers, group, quota_v1);
    }
  }
  return least;
}

int available_cpus(const fs::path& root) {
  cpu_set_t mask;
  int cpus = 1;
  if (::sched_getaffinity(0, sizeof(mask), &mask) == 0) cpus = CPU_COUNT(&mask);
  if (const auto quota = cgroup_cpus(root); quota && *quota < cpus) {
    cpus = static_cast<int>(std::ceil(*quota));
  }
  return std::max(cpus, 1);
}

}  // namespace pycoll
