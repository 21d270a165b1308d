// A GPU that several processes share without MPS: only one process's grids run at a time.
//
// All processes name the same file. The right to run is the lock on that file, so a process that
// dies gives it up. A process takes it when it has grids, gives it up when they are done, or after
// a slice if others wait, as the driver does with contexts. A kernel that waits for another process
// then waits for whole slices: the rule is that no kernel does, and spins_across_processes() counts
// those that did.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace pycoll::sim {

// Serves one executor; another of the process is as much outside as another process.
class TimeSlice {
 public:
  // Makes the file if it is not there. Throws std::system_error.
  TimeSlice(const std::string& path, double slice_s = 0.002);
  ~TimeSlice();
  TimeSlice(const TimeSlice&) = delete;

  // All processes together, since the file was made.
  uint64_t spins_across_processes() const;

  // ---- For the executor. ----

  bool try_begin();      // true: this process has the GPU
  void end();            // gives it up
  bool running() const;  // this process has the GPU
  bool over() const;     // the slice is used up and somebody else waits
  void count_spin();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pycoll::sim
