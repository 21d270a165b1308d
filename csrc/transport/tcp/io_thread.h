// The one thread of a process that sleeps on all of its TCP descriptors.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "core/clock.h"
#include "transport/tcp/descriptors.h"

namespace pycoll::tcp {

class IoHandler {
 public:
  virtual ~IoHandler() = default;
  // In the IO thread; `events` as epoll gives them. Must not wait.
  virtual void on_events(uint32_t events) = 0;
};

class IoThread {
 public:
  // `tick` runs in the thread, at the latest when its last return value has passed.
  IoThread(std::shared_ptr<Descriptors> descriptors, std::function<Nanoseconds()> tick);
  ~IoThread();
  void start();
  // Returns when the thread has ended. Idempotent.
  void stop();
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;

  // Any thread. Events are level-triggered. The number names the registration.
  uint64_t add(int fd, uint32_t events, std::weak_ptr<IoHandler> handler);
  void modify(uint64_t number, int fd, uint32_t events);
  void remove(uint64_t number, int fd);
  // Any thread: tick() within that time.
  void tick_within(Nanoseconds delay);

 private:
  void run();
  void dispatch(uint64_t number, uint32_t events);

  std::function<Nanoseconds()> tick_;
  Socket epoll_;
  Socket wake_;
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<IoHandler>> handlers_;  // guarded by mutex_
  uint64_t next_number_ = 1;                               // guarded by mutex_; 0 is wake_
  Clock::time_point next_tick_;                            // guarded by mutex_
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace pycoll::tcp
