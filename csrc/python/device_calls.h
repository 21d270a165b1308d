// The calls of a communicator on arrays of GPUs.
//
// A call is put on a stream, and the caller goes on: it begins after what is there, and what comes
// there later sees its result, as with a kernel that the caller launches. There is a group for each
// GPU that arrays are on, made at the first call there, which all ranks must make.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/fork_mark.h"
#include "runtime/device/device_group.h"
#include "runtime/device_watchdog.h"

namespace pycoll {

// Where a call goes. Handles are cudaStream_t.
struct StreamPlace {
  void* stream = nullptr;
  std::vector<void*> after{};  // other streams, whose work the call comes after
};

// A call that was queued, for who wants to wait for it. Outlives the communicator.
class DeviceOperation {
 public:
  struct Parts {
    std::weak_ptr<Communicator> control;
    std::weak_ptr<DeviceGroup> group;
    std::shared_ptr<DeviceMark> end;
    Nanoseconds timeout;
    std::string name;
    int source = -1;  // of a receive
  };
  explicit DeviceOperation(Parts parts) : parts_(std::move(parts)) {}

  // Returns when the GPU has done it; throws the group's error. False when `limit` passed first.
  // Without one the call's timeout counts, after which the group is ended: Error(timed_out).
  bool wait(std::optional<Nanoseconds> limit);
  // Done, or failed: wait() returns or throws at once.
  bool done();
  int source() const { return parts_.source; }

 private:
  bool wait_until(const Deadline& deadline);
  void check() const;

  const Parts parts_;
  bool succeeded_ = false;  // found so by the thread that waits; guarded by the GIL
};

class DeviceCalls {
 public:
  // Opens the library at that path. In a forked child the object is never destroyed: nothing of a
  // GPU can be ended there.
  static std::shared_ptr<DeviceCalls> make(std::shared_ptr<Communicator> control,
                                           const std::string& library);
  ~DeviceCalls();
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  // Throws Error(invalid_argument) for memory of several devices, or a stream of another one.
  // `timeout` of the request is set. Without the GIL.
  std::shared_ptr<DeviceOperation> run(CallRequest request, const StreamPlace& place, bool awaited);
  std::shared_ptr<DeviceOperation> run(CodecRequest request, const StreamPlace& place,
                                       bool awaited);
  std::shared_ptr<DeviceOperation> run(MessageRequest request, const StreamPlace& place,
                                       bool awaited);

  // Waits a little for what is queued; no calls after that. Idempotent.
  void close();

 private:
  DeviceCalls(std::shared_ptr<Communicator> control, const std::string& library);
  // `blocks`: more memory that the call uses.
  template <class Request>
  std::shared_ptr<DeviceOperation> run_call(Request request, std::vector<Block> blocks,
                                            const StreamPlace& place, bool awaited);
  template <class Enqueue>
  std::shared_ptr<DeviceOperation> queue(int device, const StreamPlace& place,
                                         std::optional<DeviceOperation::Parts> awaited,
                                         const Enqueue& enqueue);
  // Before the first call no group sees that a GPU fails, and peers would wait for this rank.
  template <class Body>
  auto telling_peers(const Body& body) const;
  int device_of(const std::vector<Block>& blocks) const;
  void throw_if_dead() const;
  void end_groups() const;
  void join_streams(int device, const StreamPlace& place);
  const std::shared_ptr<DeviceGroup>& group_on(int device);

  const ForkMark fork_mark_;
  std::shared_ptr<Communicator> control_;
  const std::shared_ptr<DeviceLibrary> library_;
  DeviceWatchdog watchdog_;
  // Held while something is queued, which may take long: calls of a group are made one at a time.
  std::timed_mutex mutex_;
  std::map<int, std::shared_ptr<DeviceGroup>> groups_;  // by device; guarded by mutex_, as are:
  std::set<std::pair<int, void*>> seen_streams_;        // of which devices they are is known
  bool closed_ = false;
};

}  // namespace pycoll
