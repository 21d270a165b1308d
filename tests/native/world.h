// A group whose ranks are threads of this process.
//
// All ranks map each segment once, together (SegmentMapper), because ThreadSanitizer follows
// addresses. Ranks share nothing else while they run: no lock, no counter, no log. Whatever the
// driver shared would order their accesses and so hide a missing order in the transport.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "chaos.h"
#include "core/config.h"
#include "core/error.h"
#include "random.h"
#include "runtime/communicator.h"
#include "runtime/store.h"
#include "transport/shm/segment.h"

namespace pycoll::stress {

// A result that is not what it must be.
struct CheckFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) throw CheckFailed(concat(parts...));
}

class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override;
  std::optional<std::string> get(const std::string& key, Nanoseconds timeout) override;
  std::optional<std::string> peek(const std::string& key) override { return get(key, {}); }
  void remove(const std::string& key) override;

 private:
  std::mutex mutex_;
  std::condition_variable change_;
  std::map<std::string, std::string> values_;
};

// The smallest slots, FIFOs and windows that there may be: a few hundred elements already use each
// of them many times over.
Config tiny_config();

// What the command line asks of a scenario.
struct Settings {
  uint64_t seed = 0;
  Deadline until = Deadline::after(Nanoseconds(0));  // begin no episode after that
  Nanoseconds patience = std::chrono::seconds(20);   // with one operation
};

struct WorldOptions {
  int world_size = 2;
  uint64_t seed = 0;
  Config config = tiny_config();
  bool delays = true;
  Nanoseconds timeout = std::chrono::seconds(20);
  // By rank; no entry: none.
  std::map<int, ChaosOptions> hooks;
};

struct Rank {
  int rank;
  int world_size;
  Communicator& communicator;
  Rng rng;        // this rank's own
  Rng agreed;     // gives the same numbers on every rank
  Delays delays;  // for the time between operations
};

// Runs body(0), body(1), ... at once and returns when all are done. Throws CheckFailed with what
// each that failed said.
void run_threads(int world_size, const std::function<void(int)>& body);

// Runs body on every rank at once and returns when all are done; each rank closes its communicator
// when its body ends. Throws CheckFailed with what each failed rank said.
void run_world(const WorldOptions& options, const std::function<void(Rank&)>& body);

// The same one layer below: bare transports.
void run_transports(const WorldOptions& options,
                    const std::function<void(int rank, Transport& transport)>& body);

}  // namespace pycoll::stress
