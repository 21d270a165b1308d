// The flight recorder: what each group of a process has called lately, always on.
//
// It lies in a memory file of the process, so that others may look at a rank that hangs (`pycoll
// status`), and a copy of the file is a dump (`pycoll doctor --dump`). One file a process holds a
// header and a region a group, with a ring of collectives and a ring of messages. All fields are
// 64-bit words or text; pycoll/flight/layout.py reads them.
//
// Writing costs one or two time stamps and some stores a call: no lock, no system call. A region's
// collectives are written by whoever has the group's turn, its messages by holders of the group's
// lock. Readers may come at any time and find a record half written: its first word, which goes
// last, tells. Words are atomics for their sake, relaxed but for that first one: they order nothing
// else.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/operation.h"
#include "transport/call.h"

namespace pycoll {

// What a group is, in words for readers.
struct FlightGroup {
  std::string key;   // random, the same on all of its ranks
  std::string name;  // its prefix in the store
  std::string transport;
  int rank = 0;
  int world_size = 1;
};

// How an operation ended; in the lowest bits of a record's first word.
enum class FlightState : uint64_t { under_way = 1, done = 2, failed = 3 };

using FlightWord = std::atomic<uint64_t>;

// The part of one group. Every method is cheap and throws nothing.
class FlightLog {
 public:
  // `keeper` holds what `region` lies in.
  FlightLog(FlightWord* region, std::shared_ptr<void> keeper)
      : region_(region), keeper_(std::move(keeper)) {}
  ~FlightLog();
  FlightLog(const FlightLog&) = delete;
  FlightLog& operator=(const FlightLog&) = delete;

  // Collectives, by sequence number.
  void queued(uint64_t sequence);
  void started(const CallHeader& call);
  void ended(uint64_t sequence, FlightState how);
  // Well, and soon: one store, and no time is taken.
  void ended_at_once(uint64_t sequence);
  // Messages. posted() returns the number that ended() takes.
  uint64_t posted(const MessageRequest& message);
  void ended_message(uint64_t number, int source, FlightState how);
  // The group has died of this.
  void died(std::string_view reason);

 private:
  FlightWord* const region_;
  const std::shared_ptr<void> keeper_;
  uint64_t messages_ = 0;
};

class FlightRecorder {
 public:
  // `label`: tells dumps of one process apart.
  explicit FlightRecorder(std::string label) : label_(std::move(label)) {}
  // The log of a new group; nullptr where there is no memory for it. No reason for a group to fail.
  std::unique_ptr<FlightLog> open(const FlightGroup& group);
  // A copy of the file; empty when no group was ever made.
  std::string snapshot();
  // Writes snapshot() to `<directory>/pycoll-<host name>-<pid>-<label>.flight`, which it replaces
  // as a whole, and returns the path; empty when no group was ever made. Throws Error(system) that
  // names the path.
  std::string dump(const std::string& directory);

 private:
  struct File;
  static FlightWord* free_region(File& file);

  const std::string label_;
  std::mutex mutex_;
  std::shared_ptr<File> file_;  // of this process: a forked child makes its own
};

}  // namespace pycoll
