// Errors on purpose: which call of which function fails.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace pycoll::sim::cuda {

class Faults {
 public:
  static constexpr int kKill = -1;

  // `code`: a cudaError_t, or kKill.
  void add(const std::string& function, uint64_t calls_before, int code);
  // The grammar of PYCOLL_SIM_FAULTS (control.h); ends the process if the text is not of it.
  void add_all(std::string_view text);
  void clear() { waiting_.clear(); }

  // Counts a call. What it is to return without doing anything; cudaSuccess: nothing of the kind.
  cudaError_t count(const char* function);

 private:
  struct Fault {
    uint64_t calls_left;
    int code;
  };
  std::map<std::string, std::vector<Fault>, std::less<>> waiting_;
};

}  // namespace pycoll::sim::cuda
