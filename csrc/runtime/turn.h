// Who may run a group's next operation without asking anyone.
//
// One word holds the group's sequence number and two flags, so that whoever takes a number knows in
// the same step that nobody is before it, without a lock:
//
//   busy    something is queued, posted or driven: who comes now takes the lock and queues. Set by
//           whoever queues, before anything else; cleared under the lock when nothing is left.
//   inside  a caller runs its operation right away. Only that caller clears it. Whoever queues
//           meanwhile finds it set, and leaves driving to the caller inside until that is through.
//
// The word is the only thing that orders the two, so each change is a read-modify-write of it:
// acquire when entering (what the one before left behind is visible), release when leaving.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace pycoll {

class Turn {
 public:
  uint64_t sequence() const { return word_.load(std::memory_order_relaxed) >> kShift; }
  bool inside() const { return (word_.load(std::memory_order_acquire) & kInside) != 0; }

  // False when the group is not idle.
  bool enter() {
    uint64_t seen = word_.load(std::memory_order_relaxed);
    return (seen & (kBusy | kInside)) == 0 &&
           word_.compare_exchange_strong(seen, seen | kInside, std::memory_order_acquire,
                                         std::memory_order_relaxed);
  }
  // For who is inside: the number of its operation. Nothing when someone has queued meanwhile,
  // whose operation then comes first.
  std::optional<uint64_t> take_number() {
    uint64_t seen = word_.load(std::memory_order_relaxed);
    if ((seen & kBusy) != 0 ||
        !word_.compare_exchange_strong(seen, seen + kOne, std::memory_order_relaxed)) {
      return std::nullopt;
    }
    return (seen + kOne) >> kShift;
  }
  // True when nobody came meanwhile.
  bool leave() { return (word_.fetch_and(~kInside, std::memory_order_acq_rel) & kBusy) == 0; }

  // The number of an operation that is being queued. By holders of the lock.
  uint64_t queue() {
    become_busy();
    return (word_.fetch_add(kOne, std::memory_order_relaxed) + kOne) >> kShift;
  }
  // The number of a call that is carried out elsewhere; any thread. Who is inside and has no number
  // yet finds the word changed, and queues.
  uint64_t pass_over() {
    return (word_.fetch_add(kOne, std::memory_order_relaxed) + kOne) >> kShift;
  }
  // Nobody can enter from here on. By holders of the lock.
  void become_busy() { word_.fetch_or(kBusy, std::memory_order_acq_rel); }
  // By holders of the lock, when nothing is queued, posted or driven.
  void become_idle() { word_.fetch_and(~kBusy, std::memory_order_release); }

 private:
  static constexpr uint64_t kBusy = 1;
  static constexpr uint64_t kInside = 2;
  static constexpr int kShift = 2;
  static constexpr uint64_t kOne = uint64_t{1} << kShift;

  std::atomic<uint64_t> word_{0};
};

}  // namespace pycoll
