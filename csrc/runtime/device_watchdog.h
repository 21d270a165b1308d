// Asks groups on GPUs whether all is well, so that one whose peer has died ends even when nobody
// calls it: whoever uses it may be waiting for a stream, which would wait for ever.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device/device_group.h"

namespace pycoll {

// Its owner never destroys it in a forked child, where it has no thread and the groups are the
// parent's: glibc would wait for the thread, which the child's copy of the condition variable
// counts.
class DeviceWatchdog {
 public:
  DeviceWatchdog() = default;
  ~DeviceWatchdog() { stop(); }
  DeviceWatchdog(const DeviceWatchdog&) = delete;
  DeviceWatchdog& operator=(const DeviceWatchdog&) = delete;

  // The first starts the thread.
  void watch(std::shared_ptr<DeviceGroup> group);
  // Ends all groups; by any thread.
  void abort(const std::string& reason);
  // The thread has ended when this returns, and the groups are let go.
  void stop();

 private:
  using Groups = std::vector<std::shared_ptr<DeviceGroup>>;
  void loop();

  std::mutex mutex_;
  std::condition_variable change_;
  Groups groups_;  // guarded by mutex_, as is:
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace pycoll
