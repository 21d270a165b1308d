// The host's part of what is on a stream.
//
// A thread of the group runs functions when a stream has come to them, one after the other, in the
// order in which streams come there; the stream goes on meanwhile, and waits for a function's end
// where it was told to. Nothing blocks who enqueues, and a graph may hold both: a host function of
// the stream hands the work over, and the stream waits for a word in pinned memory, which the
// thread makes 1 and the stream makes 0 again. Calls of a group run in the order of streams
// (CudaGroup), so at all ranks the work of a group comes in the same order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "core/error.h"
#include "transport/cuda_ipc/driver.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {

class HostWork {
 public:
  // How many pieces of work may be begun and not waited for.
  static constexpr size_t kSlots = 8;
  using Work = std::function<void()>;

  explicit HostWork(const Driver& driver);
  ~HostWork() { stop(); }
  HostWork(const HostWork&) = delete;
  HostWork& operator=(const HostWork&) = delete;

  // Begins after what is on the stream. `captured`: it may run any number of times.
  void begin(size_t slot, Work work, bool captured, cudaStream_t stream);
  // What comes later on the stream begins when the work has returned that was begun with `slot`
  // last. Comes once after each begin().
  void end(size_t slot, cudaStream_t stream);

  // What work has thrown: then no other runs any more, and streams wait until release().
  std::optional<Error> failure() const;
  // Drops what has not begun, and lets go of streams that wait now.
  void release();
  // Runs nothing any more: what runs must end by itself, and no stream may come to work then.
  void stop();

 private:
  struct Task {
    HostWork* owner;
    size_t slot;
    Work work;
    bool captured;
    std::list<Task>::iterator place;
  };

  static void hand_over(void* task);
  void loop();
  std::optional<Error> run(const Task& task) const;
  uint32_t* word_of(size_t slot) const { return reinterpret_cast<uint32_t*>(words_.data()) + slot; }
  void open(size_t slot) const;

  const Driver& driver_;
  const PinnedMemory words_;  // [kSlots]
  mutable std::mutex mutex_;
  std::condition_variable change_;
  std::list<Task> tasks_;    // that streams may come to; guarded by mutex_, as are:
  std::deque<Task*> ready_;  // that streams have come to
  std::optional<Error> failure_;
  bool given_up_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace pycoll::cuda
