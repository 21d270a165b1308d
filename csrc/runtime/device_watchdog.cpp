#include "runtime/device_watchdog.h"

#include <utility>

namespace pycoll {
namespace {

// How often it asks: a dead peer is named within a second.
constexpr auto kInterval = std::chrono::milliseconds(100);

}  // namespace

void DeviceWatchdog::watch(std::shared_ptr<DeviceGroup> group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(std::move(group));
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
}

void DeviceWatchdog::abort(const std::string& reason) {
  std::unique_lock lock(mutex_);
  const Groups groups = groups_;
  lock.unlock();
  for (const auto& group : groups) group->abort(reason);
}

void DeviceWatchdog::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  change_.notify_all();
  if (thread_.joinable()) thread_.join();
  Groups gone;  // they end without the lock: they may wait for the GPU
  const std::lock_guard lock(mutex_);
  gone.swap(groups_);
}

void DeviceWatchdog::loop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const Groups groups = groups_;
    lock.unlock();
    for (const auto& group : groups) {
      try {
        group->check();
      } catch (const std::exception&) {
        // It is the group's error now: whoever waits is let go, and every later call throws it.
      }
    }
    lock.lock();
    change_.wait_for(lock, kInterval, [&] { return stopping_; });
  }
}

}  // namespace pycoll
