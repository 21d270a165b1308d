// Ranks of a group on simulated GPUs: processes that know nothing of each other but a directory.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "processes.h"
#include "runtime/device/device_group.h"

namespace pycoll::sim::tests {

// What a suite is run with.
struct GroupSettings {
  int ranks = 2;
  uint64_t cases = 10;
  uint64_t seed = 0;
  // No device reaches another's memory.
  bool apart = false;
  // A letter a rank, which is its host: "aabb"; empty: all on one.
  std::string hosts;
  // Ranks are threads of this process.
  bool threads = false;
};

struct GroupRank {
  int rank;
  int ranks;
  int device;  // the first rank of a host has device 0
  Meeting& meeting;
  std::shared_ptr<Communicator> control;
  std::shared_ptr<pycoll::DeviceLibrary> library;
  std::shared_ptr<pycoll::DeviceGroup> group;
  uint64_t seed;
  bool threads;

  // Before ranks enqueue, and after they have waited: allocating, copying and freeing wait for all
  // that is on the device, and so, among threads of one process, for what waits for this rank.
  void settle() const {
    if (threads) meeting.barrier();
  }
};

// Runs `body` in a process (or thread) a rank; the ranks of a host have its devices in turn. Throws
// unless each process ends with what `expected` says of it: 0 by default; a wait status.
void run_group(const GroupSettings& settings, const std::function<void(GroupRank&)>& body,
               const std::function<int(int rank)>& expected = nullptr);

// The same, with a body that makes the group itself.
void run_without_group(const GroupSettings& settings, const std::function<void(GroupRank&)>& body);

struct GroupSuite {
  std::string name;
  std::string summary;
  std::function<void(const GroupSettings&)> run;
};
std::vector<GroupSuite> group_suites();
void collectives_suite(const GroupSettings& settings);
void messages_suite(const GroupSettings& settings);
void graphs_suite(const GroupSettings& settings);
void places_suite(const GroupSettings& settings);
void premul_suite(const GroupSettings& settings);
void codecs_suite(const GroupSettings& settings);
void sums_suite(const GroupSettings& settings);
void bits_suite(const GroupSettings& settings);
void killed_suite(const GroupSettings& settings);
void killed_amid_suite(const GroupSettings& settings);
void late_suite(const GroupSettings& settings);
void abort_suite(const GroupSettings& settings);
void refused_suite(const GroupSettings& settings);
void mismatch_suite(const GroupSettings& settings);
void absent_suite(const GroupSettings& settings);
void failed_gpu_suite(const GroupSettings& settings);
void failed_open_suite(const GroupSettings& settings);
void captures_suite(const GroupSettings& settings);
void buried_suite(const GroupSettings& settings);
void two_groups_suite(const GroupSettings& settings);

}  // namespace pycoll::sim::tests
