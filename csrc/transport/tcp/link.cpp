#include "transport/tcp/link.h"

#include "core/error.h"

namespace pycoll::tcp {
namespace {

// Messages up to that size all go over the first connection: they are over before another thread
// could help, and the receiver looks there first.
constexpr size_t kSmall = 8192;
// When one connection of a link has ended, the others have that long to end by themselves, with
// what is on its way.
constexpr Nanoseconds kGrace = std::chrono::milliseconds(200);

}  // namespace

void Link::start(std::vector<Socket> sockets, IoThread& io) {
  for (Socket& socket : sockets) {
    connections_.push_back(std::make_shared<Connection>(weak_from_this(), std::move(socket), io));
  }
  for (const auto& connection : connections_) connection->start();
}

bool Link::attach(const std::shared_ptr<Session>& session) {
  const std::lock_guard lock(mutex_);
  if (ends_ > 0) return false;
  sessions_[session->number()] = session;
  return true;
}

void Link::detach(uint32_t number) {
  std::shared_ptr<Session> last;  // let go without the lock
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(number);
  if (found == sessions_.end()) return;
  last = std::move(found->second);
  sessions_.erase(found);
}

std::shared_ptr<Session> Link::find(uint32_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = sessions_.find(number);
  return found == sessions_.end() ? nullptr : found->second;
}

bool Link::is_used() {
  const std::lock_guard lock(mutex_);
  return !sessions_.empty();
}

void Link::send(Outgoing&& frame, Session& owner) {
  size_t which = 0;
  // The channel too: rounds that are under way at once are at the same number.
  if (frame.header.bytes > kSmall) {
    which = (frame.header.index + frame.header.channel) % connections_.size();
  }
  connections_[which]->send(std::move(frame), &owner);
}

void Link::send_open(FrameKind kind, const OpenBody& body) {
  Outgoing frame;
  frame.header.kind = kind;
  frame.text = body.to_text();
  frame.header.bytes = static_cast<uint32_t>(frame.text.size());
  connections_[0]->send(std::move(frame), nullptr);
}

void Link::send_on_all(const FrameHeader& header) {
  for (const auto& connection : connections_) {
    Outgoing frame;
    frame.header = header;
    connection->send(std::move(frame), nullptr);
  }
}

bool Link::poll() {
  bool came = false;
  for (const auto& connection : connections_) came |= connection->poll(*this);
  return came;
}

void Link::rearm() {
  for (const auto& connection : connections_) connection->rearm();
}

void Link::stop_reading(const Session& session) {
  for (const auto& connection : connections_) connection->stop_reading(session);
}

void Link::stop_sending(const Session& session) {
  for (const auto& connection : connections_) connection->stop_sending(session);
}

bool Link::drained() {
  for (const auto& connection : connections_) {
    if (!connection->drained()) return false;
  }
  return true;
}

void Link::look_after(Clock::time_point now) {
  std::string reason;
  for (const auto& connection : connections_) {
    if (!connection->is_lost(heartbeat_)) continue;
    reason = concat("its host did not answer for ", to_seconds(heartbeat_), " s");
  }
  {
    const std::lock_guard lock(mutex_);
    if (reason.empty() && (ends_ == 0 || now - first_end_ < kGrace)) return;
    if (reason_.empty()) reason_ = reason;
  }
  for (const auto& connection : connections_) connection->shut();
}

void Link::close() {
  for (const auto& connection : connections_) connection->close();
  {
    const std::lock_guard lock(mutex_);
    ends_ = connections();
    ended_.store(true, std::memory_order_release);
  }
  end_sessions();
}

void Link::end_sessions() {
  std::map<uint32_t, std::shared_ptr<Session>> sessions;
  std::string reason;
  {
    const std::lock_guard lock(mutex_);
    // Each is told once: it may be asked for over another link by the time this one is closed.
    sessions.swap(sessions_);
    reason = reason_;
  }
  for (const auto& [number, session] : sessions) session->end(reason);
}

void Link::on_connection_end(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (ends_++ == 0) first_end_ = Clock::now();
    if (reason_.empty()) reason_ = reason;
    // What came over the others is read before anybody is told.
    if (ends_ >= connections()) ended_.store(true, std::memory_order_release);
  }
  if (has_ended()) end_sessions();
  owner_.on_end(shared_from_this());
}

void Link::on_control(const FrameHeader& header, const std::string& payload,
                      const std::shared_ptr<Session>& session) {
  if (header.kind == FrameKind::open || header.kind == FrameKind::opened) {
    OpenBody body;
    if (!OpenBody::parse(payload, body)) {
      fail(ErrorKind::peer_failed, "it sent a request for a session that cannot be read");
    }
    header.kind == FrameKind::open ? owner_.on_open(shared_from_this(), body)
                                   : owner_.on_opened(shared_from_this(), body);
  } else if (session) {
    session->on_control(header, payload, connections());
  }
}

}  // namespace pycoll::tcp
