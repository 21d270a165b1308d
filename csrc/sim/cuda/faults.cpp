#include "sim/cuda/faults.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>

#include "sim/cuda/settings.h"

namespace pycoll::sim::cuda {

void Faults::add(const std::string& function, uint64_t calls_before, int code) {
  waiting_[function].push_back({calls_before, code});
}

void Faults::add_all(std::string_view text) {
  while (!text.empty()) {
    const std::string_view entry = text.substr(0, text.find(','));
    text.remove_prefix(entry.size() == text.size() ? text.size() : entry.size() + 1);
    const size_t colon = entry.find(':'), equals = entry.find('=');
    uint64_t calls = 0;
    int code = kKill;
    bool good = colon != entry.npos && equals != entry.npos && colon < equals;
    if (good) {
      const auto end = entry.data() + equals;
      good = std::from_chars(entry.data() + colon + 1, end, calls).ptr == end;
      const std::string_view what = entry.substr(equals + 1);
      const auto stop = what.data() + what.size();
      good = good && (what == "kill" || std::from_chars(what.data(), stop, code).ptr == stop);
    }
    if (!good) {
      give_up("PYCOLL_SIM_FAULTS: `" + std::string(entry) +
              "` is not function:calls=code or =kill");
    }
    add(std::string(entry.substr(0, colon)), calls, code);
  }
}

cudaError_t Faults::count(const char* function) {
  const auto found = waiting_.find(std::string_view(function));
  if (found == waiting_.end()) return cudaSuccess;
  auto& faults = found->second;
  for (size_t i = 0; i < faults.size(); ++i) {
    if (faults[i].calls_left-- > 0) continue;
    const int code = faults[i].code;
    faults.erase(faults.begin() + static_cast<ptrdiff_t>(i));
    // Those behind it counted this call too, or will never be reached in time.
    for (size_t j = i; j < faults.size(); ++j) {
      if (faults[j].calls_left > 0) --faults[j].calls_left;
    }
    if (code == kKill) ::kill(::getpid(), SIGKILL);
    return static_cast<cudaError_t>(code);
  }
  return cudaSuccess;
}

}  // namespace pycoll::sim::cuda
