#include "transport/tcp/connection.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "transport/tcp/link.h"
#include "transport/tcp/session.h"

namespace pycoll::tcp {
namespace {

// A driver that has not looked for that long does not look any more.
constexpr Nanoseconds kParkTime = std::chrono::milliseconds(1);
// Reads in a row before others get their turn.
constexpr int kReads = 16;
// Answers and abort texts that a peer does not read are dropped beyond that many frames.
constexpr size_t kLongQueue = 4096;

// A process that is gone leaves an end of file, or a reset where something was still to be read.
std::string how_it_ended(int error) {
  if (error == 0 || error == ECONNRESET || error == EPIPE) return "";
  if (error == ETIMEDOUT) return "its host does not answer";
  return std::strerror(error);
}

int64_t ticks(Clock::time_point when) {
  return when.time_since_epoch().count();
}

}  // namespace

void Outgoing::move_to_slot(size_t sent) {
  if (slot.data == nullptr || slot.data == payload.data()) return;
  const size_t before = sizeof(header) + (call ? sizeof(*call) : 0);
  const size_t gone = std::min(payload.size(), sent > before ? sent - before : 0);
  if (gone < payload.size()) {
    std::memcpy(slot.data + gone, payload.data() + gone, payload.size() - gone);
  }
  payload = {slot.data, payload.size()};
}

Connection::Connection(std::weak_ptr<Link> link, Socket socket, IoThread& io)
    : link_(std::move(link)), io_(io), socket_(std::move(socket)) {}

Connection::~Connection() {
  close();
}

void Connection::start() {
  const std::lock_guard lock(interest_mutex_);
  interest_ = registered_interest_ = EPOLLIN;
  registration_ = io_.add(socket_.get(), interest_, weak_from_this());
}

void Connection::set_interest(uint32_t add, uint32_t remove) {
  const std::lock_guard lock(interest_mutex_);
  interest_ = (interest_ | add) & ~remove;
  apply_interest();
}

void Connection::set_parked(bool parked) {
  const std::lock_guard lock(interest_mutex_);
  parked_.store(parked, std::memory_order_relaxed);
  apply_interest();
}

void Connection::apply_interest() {
  const uint32_t wanted = parked_.load(std::memory_order_relaxed) ? 0 : interest_;
  if (registration_ == 0 || wanted == registered_interest_) return;
  registered_interest_ = wanted;
  io_.modify(registration_, socket_.get(), wanted);
}

bool Connection::looked_at(Clock::time_point now) const {
  return ticks(now) - last_poll_.load(std::memory_order_relaxed) < kParkTime.count();
}

bool Connection::write_some(Outgoing& frame, size_t& sent) {
  const std::span<const std::byte> payload =
      frame.text.empty() ? frame.payload : std::as_bytes(std::span(frame.text));
  std::span<const std::byte> pieces[3] = {std::as_bytes(std::span(&frame.header, 1)), {}, payload};
  if (frame.call) pieces[1] = std::as_bytes(std::span(&*frame.call, 1));
  iovec parts[3];
  size_t count = 0;
  size_t skip = sent;
  size_t wanted = 0;
  for (const auto& piece : pieces) {
    const size_t done = std::min(skip, piece.size());
    skip -= done;
    if (piece.size() == done) continue;
    parts[count++] = {const_cast<std::byte*>(piece.data() + done), piece.size() - done};
    wanted += piece.size() - done;
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  ssize_t written;
  do {
    written = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (written < 0 && errno == EINTR);
  if (written < 0) {
    // ENOBUFS and ENOMEM pass. After anything else the reading side finds the end of the
    // connection, behind whatever came before it.
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)
      return false;
    broken_ = true;
    return false;
  }
  sent += static_cast<size_t>(written);
  return static_cast<size_t>(written) == wanted;
}

void Connection::send(Outgoing&& frame, Session* owner) {
  frame.header.has_call = frame.call ? 1 : 0;
  bool waits = false;
  {
    const std::lock_guard lock(tx_mutex_);
    if (!queue_.empty()) flush();
    size_t sent = 0;
    if (!broken_ && queue_.empty() && write_some(frame, sent)) {
      return frame.done();
    }
    if (broken_) return frame.done();
    const FrameKind kind = frame.header.kind;
    const bool may_drop =
        kind == FrameKind::call || kind == FrameKind::inquire || kind == FrameKind::abort;
    if (may_drop && queue_.size() > kLongQueue) return;
    if (owner != nullptr) frame.owner = owner->shared_from_this();
    waits = queue_.empty();
    if (waits) sent_ = sent;
    queue_.push_back(std::move(frame));
    tx_waiting_.store(true, std::memory_order_relaxed);
  }
  if (waits) set_interest(EPOLLOUT, 0);
}

void Connection::flush() {
  while (!queue_.empty()) {
    Outgoing& first = queue_.front();
    if (!broken_ && !write_some(first, sent_) && !broken_) return;
    first.done();
    if (first.slot.busy != nullptr) first.owner->board().ring();  // a slot is free
    queue_.pop_front();
    sent_ = 0;
  }
  tx_waiting_.store(false, std::memory_order_relaxed);
  set_interest(0, EPOLLOUT);
}

std::optional<std::string> Connection::read_some(Link& link, bool& came) {
  try {
    for (int i = 0; i < kReads; ++i) {
      switch (reader_.read(socket_.get(), link)) {
        case FrameReader::Result::nothing:
          return std::nullopt;
        case FrameReader::Result::all:
          came = true;
          return std::nullopt;
        case FrameReader::Result::some:
          came = true;
          break;
        case FrameReader::Result::end:
          return how_it_ended(errno);
      }
    }
  } catch (const Error& error) {
    return concat("it broke the protocol: ", error.what());
  } catch (const std::exception& error) {
    // No memory, say. In the middle of a frame there is no way on; and nobody above this thread
    // could catch it.
    return concat("reading what it sent failed: ", error.what());
  }
  return std::nullopt;
}

bool Connection::poll(Link& link) {
  if (tx_waiting_.load(std::memory_order_relaxed)) {
    const std::unique_lock tx(tx_mutex_, std::try_to_lock);
    if (tx.owns_lock()) flush();
  }
  std::optional<std::string> end;
  bool came = false;
  {
    const std::unique_lock rx(rx_mutex_, std::try_to_lock);
    // Another thread reads: it delivers what there is, and rings.
    if (!rx.owns_lock() || has_ended()) return false;
    last_poll_.store(ticks(Clock::now()), std::memory_order_relaxed);
    end = read_some(link, came);
    if (end) ended_.store(true, std::memory_order_release);
  }
  if (end) note_end(link, *end);
  return came;
}

void Connection::on_events(uint32_t events) {
  const auto link = link_.lock();
  if (!link) return;
  const bool last_words = (events & (EPOLLHUP | EPOLLERR)) != 0;
  if (!last_words && looked_at(Clock::now())) {
    set_parked(true);
    // It may have gone to sleep meanwhile: then it has unparked before, or does so after.
    if (looked_at(Clock::now())) return link->park(shared_from_this());
    set_parked(false);
  }
  if ((events & EPOLLOUT) != 0) {
    const std::lock_guard tx(tx_mutex_);
    flush();
  }
  if (!last_words && (events & EPOLLIN) == 0) return;
  std::optional<std::string> end;
  {
    const std::lock_guard rx(rx_mutex_);
    if (has_ended()) return;
    bool came = false;
    end = read_some(*link, came);
    if (end) ended_.store(true, std::memory_order_release);
  }
  if (end) note_end(*link, *end);
}

void Connection::note_end(Link& link, const std::string& reason) {
  {
    // Its events would come for ever.
    const std::lock_guard lock(interest_mutex_);
    if (registration_ != 0) io_.remove(registration_, socket_.get());
    registration_ = 0;
  }
  shut();
  {
    const std::lock_guard tx(tx_mutex_);
    broken_ = true;
    flush();
  }
  link.on_connection_end(reason);
}

void Connection::rearm() {
  last_poll_.store(0, std::memory_order_relaxed);
  set_parked(false);
}

void Connection::stop_reading(const Session& session) {
  const std::lock_guard rx(rx_mutex_);
  reader_.skip_payload_of(session);
}

void Connection::stop_sending(const Session& session) {
  const std::lock_guard tx(tx_mutex_);
  for (Outgoing& frame : queue_) {
    if (frame.owner.get() == &session) frame.move_to_slot(&frame == &queue_.front() ? sent_ : 0);
  }
}

bool Connection::unpark_when_unused() {
  if (!parked_.load(std::memory_order_relaxed)) return false;
  if (looked_at(Clock::now())) return true;
  set_parked(false);
  return false;
}

bool Connection::drained() {
  const std::lock_guard lock(tx_mutex_);
  if (broken_ || has_ended()) return true;
  int unacknowledged = 0;
  return queue_.empty() && ::ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) == 0 &&
         unacknowledged == 0;
}

bool Connection::is_lost(Nanoseconds heartbeat) {
  if (has_ended()) return false;
  tcp_info info{};
  socklen_t length = sizeof(info);
  const std::lock_guard lock(tx_mutex_);
  if (closed_.load(std::memory_order_relaxed) ||
      ::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) {
    return false;
  }
  // The kernel of a stopped process still acknowledges and answers probes of a full window.
  const bool unanswered = info.tcpi_retransmits >= 2 || info.tcpi_probes >= 2;
  const auto silent = std::chrono::milliseconds(info.tcpi_last_ack_recv);
  return unanswered && silent > heartbeat;
}

void Connection::shut() {
  const std::lock_guard lock(tx_mutex_);
  if (!closed_.load(std::memory_order_relaxed)) ::shutdown(socket_.get(), SHUT_RDWR);
}

void Connection::close() {
  // Let go when no lock is held.
  std::deque<Outgoing> unsent;
  std::shared_ptr<Session> last_read;
  const std::scoped_lock lock(rx_mutex_, tx_mutex_);
  if (closed_.exchange(true, std::memory_order_relaxed)) return;
  {
    const std::lock_guard interest(interest_mutex_);
    if (registration_ != 0) io_.remove(registration_, socket_.get());
    registration_ = 0;
  }
  ended_.store(true, std::memory_order_release);
  broken_ = true;
  last_read = reader_.let_go();
  unsent.swap(queue_);
  for (const Outgoing& frame : unsent) frame.done();
  socket_.reset();
}

}  // namespace pycoll::tcp
