// What the sessions of one rank's group share: its doorbell, its current call, the first abort.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "core/clock.h"
#include "transport/call.h"
#include "transport/shm/doorbell.h"

namespace pycoll::tcp {

class Board {
 public:
  // Any thread.
  void ring() {
    if (has_waker_.load(std::memory_order_acquire)) {
      const std::lock_guard lock(mutex_);
      if (waker_) return waker_();
    }
    shm::wake_if_sleeping(sleeping_);
  }
  // An empty one takes it away; none is called after that.
  void set_waker(std::function<void()> waker) {
    const std::lock_guard lock(mutex_);
    waker_ = std::move(waker);
    has_waker_.store(true, std::memory_order_release);
  }
  void prepare_sleep() { shm::prepare_sleep(sleeping_); }
  void sleep(Nanoseconds at_most) { shm::sleep(sleeping_, at_most); }
  void cancel_sleep() { shm::cancel_sleep(sleeping_); }

  void announce(const CallHeader& call) {
    const std::lock_guard lock(mutex_);
    call_ = call;
  }
  std::optional<CallHeader> call() const {
    const std::lock_guard lock(mutex_);
    return call_;
  }
  // True when it was announced before.
  bool announce_elsewhere(const CallHeader& call) {
    const std::lock_guard lock(mutex_);
    CallHeader& place = elsewhere_[call.sequence % elsewhere_.size()];
    const bool again = place.sequence == call.sequence;
    place = call;
    latest_elsewhere_ = std::max(latest_elsewhere_, call.sequence);
    return again;
  }
  // What a peer that is in its call of that number should know of: this rank's of the same number,
  // if that is carried out elsewhere; else how far it has come.
  std::optional<CallHeader> answer_to(uint32_t sequence) const {
    const std::lock_guard lock(mutex_);
    const CallHeader& same = elsewhere_[sequence % elsewhere_.size()];
    if (same.sequence != 0 && static_cast<uint32_t>(same.sequence) == sequence) return same;
    const uint64_t here = call_ ? call_->sequence : 0;
    if (latest_elsewhere_ <= here || static_cast<uint32_t>(here) == sequence) return call_;
    return elsewhere_[latest_elsewhere_ % elsewhere_.size()];
  }

  void note_abort(const std::string& reason) {
    {
      const std::lock_guard lock(mutex_);
      if (!abort_) abort_ = reason;
      aborted_.store(true, std::memory_order_release);
    }
    ring();
  }
  std::optional<std::string> peer_abort() const {
    if (!aborted_.load(std::memory_order_acquire)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    return abort_;
  }

 private:
  std::atomic<uint32_t> sleeping_{0};
  std::atomic<bool> has_waker_{false};
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_;
  std::function<void()> waker_;             // guarded by mutex_, like the rest
  std::optional<CallHeader> call_;          // announced last
  std::array<CallHeader, 64> elsewhere_{};  // by sequence % 64
  uint64_t latest_elsewhere_ = 0;           // sequence
  std::optional<std::string> abort_;
};

}  // namespace pycoll::tcp
