// How many CPUs this process may use.
#pragma once

#include <filesystem>
#include <optional>

namespace pycoll {

// The tightest quota of the process's control groups, its own and those above it, in CPUs (1.5 is
// three halves of one); none without. Versions 1 and 2 of cgroups, also side by side. `root` stands
// for "/": tests have trees of their own. Files that are missing or not understood set no limit.
std::optional<double> cgroup_cpus(const std::filesystem::path& root = "/");

// Affinity mask of the calling thread, capped by the quota rounded up; at least 1.
int available_cpus(const std::filesystem::path& root = "/");

}  // namespace pycoll
