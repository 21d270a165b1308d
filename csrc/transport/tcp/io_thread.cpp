#include "transport/tcp/io_thread.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>

#include "core/error.h"
#include "core/signals.h"

namespace pycoll::tcp {

IoThread::IoThread(std::shared_ptr<Descriptors> descriptors, std::function<Nanoseconds()> tick)
    : tick_(std::move(tick)),
      epoll_(descriptors, [] { return ::epoll_create1(EPOLL_CLOEXEC); }),
      wake_(descriptors, [] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }),
      next_tick_(Clock::now()) {
  if (!epoll_ || !wake_) fail(ErrorKind::system, errno_text("epoll_create1 or eventfd"));
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    fail(ErrorKind::system, errno_text("epoll_ctl"));
  }
}

IoThread::~IoThread() {
  stop();
}

void IoThread::start() {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

void IoThread::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_relaxed);
  tick_within(Nanoseconds(0));
  thread_.join();
}

uint64_t IoThread::add(int fd, uint32_t events, std::weak_ptr<IoHandler> handler) {
  const std::lock_guard lock(mutex_);
  const uint64_t number = next_number_++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail(ErrorKind::system, errno_text("epoll_ctl"));
  }
  handlers_[number] = std::move(handler);
  return number;
}

void IoThread::modify(uint64_t number, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = number;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void IoThread::remove(uint64_t number, int fd) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  const std::lock_guard lock(mutex_);
  handlers_.erase(number);
}

void IoThread::tick_within(Nanoseconds delay) {
  const auto at = Clock::now() + delay;
  {
    const std::lock_guard lock(mutex_);
    if (at >= next_tick_ && !stopping_.load(std::memory_order_relaxed)) return;
    next_tick_ = std::min(at, next_tick_);
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void IoThread::dispatch(uint64_t number, uint32_t events) {
  if (number == 0) {
    uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof(count));
    return;
  }
  std::shared_ptr<IoHandler> handler;
  {
    const std::lock_guard lock(mutex_);
    const auto found = handlers_.find(number);
    if (found != handlers_.end()) handler = found->second.lock();
  }
  if (handler) handler->on_events(events);
}

void IoThread::run() {
  ::pthread_setname_np(::pthread_self(), "pycoll-tcp");
  std::array<epoll_event, 64> events;
  while (!stopping_.load(std::memory_order_relaxed)) {
    Clock::time_point due;
    {
      const std::lock_guard lock(mutex_);
      due = next_tick_;
    }
    auto now = Clock::now();
    if (due <= now) {
      {
        const std::lock_guard lock(mutex_);
        next_tick_ = now + std::chrono::hours(1);  // what comes in while tick() runs counts
      }
      const Nanoseconds delay = tick_();
      now = Clock::now();
      const std::lock_guard lock(mutex_);
      next_tick_ = std::min(next_tick_, now + delay);
      due = next_tick_;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - now).count();
    const int limit = static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), limit);
    for (int i = 0; i < count; ++i) {
      dispatch(events[static_cast<size_t>(i)].data.u64, events[static_cast<size_t>(i)].events);
    }
  }
}

}  // namespace pycoll::tcp
