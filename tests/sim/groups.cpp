// Groups of processes on simulated GPUs, through the interface that the rest of pycoll uses.
//
//   groups --list
//   groups SUITE RANKS CASES [SEED [apart | threads | HOSTS]]
//
// apart: no device reaches another's memory. threads: ranks are threads of one process. HOSTS: a
// letter a rank, "aabb", which is its host.
// The environment says how many devices there are, and the rest (csrc/sim/control.h). Exit code 0:
// all as it must be; 1: not; 2: wrong usage.
#include <cstdio>
#include <cstdlib>

#include "group_world.h"

using namespace pycoll::sim::tests;

std::vector<GroupSuite> pycoll::sim::tests::group_suites() {
  return {
      {"collectives", "every collective, type, operation and size, in and out of place",
       collectives_suite},
      {"messages", "batches of send and recv, collectives between them", messages_suite},
      {"graphs", "captured calls, replayed among eager ones, on two streams", graphs_suite},
      {"places", "vectors that peers use where they lie, memory that is freed and made again",
       places_suite},
      {"premul", "premul_sum with a factor a rank", premul_suite},
      {"codecs", "collectives over codecs have the bits of those on the CPU", codecs_suite},
      {"sums", "an all_reduce of every type and operation, of sizes around those where it is cut",
       sums_suite},
      {"bits", "sums of fractions have the same bits on every rank, and every time", bits_suite},
      {"two_groups", "two groups of the same ranks, calls in flight of both", two_groups_suite},
      {"refused", "calls that are refused leave the group as it was", refused_suite},
      {"killed", "a rank dies; the others say which", killed_suite},
      {"killed_amid", "a rank dies somewhere in a large call", killed_amid_suite},
      {"late", "a rank does not come; the others end, by their timeout", late_suite},
      {"abort", "a rank gives up; the others hear of it", abort_suite},
      {"mismatch", "ranks that call different things say what differs", mismatch_suite},
      {"absent", "a rank that does not come is named when the time is up", absent_suite},
      {"failed_gpu", "a GPU fails while its process lives; all ranks say which", failed_gpu_suite},
      {"failed_open", "what a group needs fails on one rank; all say so, and may try again",
       failed_open_suite},
      {"captures", "calls and new groups beside captures that they are no part of", captures_suite},
      {"buried", "groups that go while work of theirs is behind somebody else's", buried_suite},
  };
}

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const bool lists = name == "--list";
  for (const GroupSuite& suite : group_suites()) {
    if (lists) std::printf("%-16s %s\n", suite.name.c_str(), suite.summary.c_str());
    if (name != suite.name || argc < 4) continue;
    GroupSettings settings;
    settings.ranks = std::atoi(argv[2]);
    settings.cases = std::strtoull(argv[3], nullptr, 10);
    settings.seed = argc > 4 ? std::strtoull(argv[4], nullptr, 10) : 0;
    const std::string where = argc > 5 ? argv[5] : "";
    settings.apart = where == "apart";
    settings.threads = where == "threads";
    if (!settings.apart && !settings.threads) settings.hosts = where;
    if (!settings.hosts.empty() && settings.hosts.size() != static_cast<size_t>(settings.ranks)) {
      break;
    }
    if (settings.ranks < 1 || settings.ranks > Meeting::kRanks) break;
    try {
      suite.run(settings);
      std::printf("ok %s\n", name.c_str());
      return 0;
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", name.c_str(), error.what());
      return 1;
    }
  }
  if (lists) return 0;
  std::fprintf(stderr,
               "usage: groups --list | SUITE RANKS CASES [SEED [apart | threads | HOSTS]]\n");
  return 2;
}
