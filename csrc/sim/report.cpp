#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <sstream>
#include <utility>

#include "sim/engine.h"

namespace pycoll::sim {
namespace {

constexpr size_t kMostLines = 40;

std::string describe(const Thread& thread, uint64_t changes) {
  const bool spins = thread.spinning || thread.stuck_since == changes;
  std::ostringstream out;
  switch (thread.state) {
    case ThreadState::at_barrier:
      out << "wait at __syncthreads";
      break;
    case ThreadState::at_warp_operation:
      out << "wait for the lanes of mask 0x" << std::hex << thread.mask << std::dec;
      break;
    case ThreadState::exited:
      return "have exited";
    case ThreadState::ready:
      out << (spins ? "spin" : "can run");
  }
  if (thread.place.file != nullptr) {
    const bool there = thread.state != ThreadState::ready || spins;
    out << (there ? " at " : ", last waited at ") << thread.place.file << ':' << thread.place.line;
  }
  return out.str();
}

// "0-31, 40"
std::string ranges(const std::vector<unsigned>& numbers) {
  std::ostringstream out;
  for (size_t i = 0; i < numbers.size();) {
    size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    out << (i == 0 ? "" : ", ") << numbers[i];
    if (j > i) out << '-' << numbers[j];
    i = j + 1;
  }
  return out.str();
}

}  // namespace

std::string describe_threads(const Waiting& waiting, const Block* only) {
  std::ostringstream out;
  size_t lines = 0;
  for (const auto& block : waiting.blocks) {
    if (only != nullptr && block.get() != only) continue;
    std::map<std::string, std::vector<unsigned>> groups;
    for (const Thread& thread : block->threads) {
      groups[describe(thread, waiting.changes)].push_back(thread.number);
    }
    for (const auto& [what, numbers] : groups) {
      if (++lines > kMostLines) continue;
      out << "  device " << block->grid->launch.device << " block (" << block->index.x << ','
          << block->index.y << ',' << block->index.z << "): threads " << ranges(numbers) << ' '
          << what << '\n';
    }
  }
  if (lines > kMostLines) out << "  and " << lines - kMostLines << " more groups of threads\n";
  return out.str();
}

void end_process(const std::string& report,
                 const std::function<void(const std::string&)>& handler) {
  if (handler) {
    handler(report);
  } else {
    std::fputs(report.c_str(), stderr);
  }
  std::fflush(stdout);
  std::fflush(stderr);
  // Not _exit, before which a sanitizer would look for what is not finished and choose another
  // code.
  ::syscall(SYS_exit_group, kFailureExitCode);
  __builtin_unreachable();
}

}  // namespace pycoll::sim
