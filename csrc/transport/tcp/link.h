// The endpoint between two processes: a few connections that all groups share.
//
// Messages of a FIFO are spread over the connections by their number, everything else goes over the
// first. A link lives as long as a group uses it, on either side; groups come and go on it
// (`open`, `leave`).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/tcp/connection.h"
#include "transport/tcp/session.h"

namespace pycoll::tcp {

// Who knows the groups: frames that are about more than one session go there.
class LinkOwner {
 public:
  virtual ~LinkOwner() = default;
  virtual void on_open(const std::shared_ptr<Link>& link, const OpenBody& body) = 0;
  virtual void on_opened(const std::shared_ptr<Link>& link, const OpenBody& body) = 0;
  virtual void on_end(const std::shared_ptr<Link>& link) = 0;
  virtual void park(std::shared_ptr<Connection> connection) = 0;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(LinkOwner& owner, Id peer, Nanoseconds heartbeat)
      : owner_(owner), peer_(peer), heartbeat_(heartbeat) {}
  ~Link() { close(); }

  // Takes the connections, in their order, and begins to read them.
  void start(std::vector<Socket> sockets, IoThread& io);

  const Id& peer() const { return peer_; }
  Nanoseconds heartbeat() const { return heartbeat_; }
  int connections() const { return static_cast<int>(connections_.size()); }

  // False when the link has ended: it opens no more sessions.
  bool attach(const std::shared_ptr<Session>& session);
  void detach(uint32_t number);
  std::shared_ptr<Session> find(uint32_t number);
  bool is_used();

  // Any thread.
  void send(Outgoing&& frame, Session& owner);
  void send_open(FrameKind kind, const OpenBody& body);
  void send_on_all(const FrameHeader& header);
  bool poll();
  void rearm();
  void stop_reading(const Session& session);
  void stop_sending(const Session& session);
  bool drained();

  // In the IO thread, now and then.
  void look_after(Clock::time_point now);
  // Ends it for all sessions.
  void close();

  // By whoever reads a connection.
  void on_control(const FrameHeader& header, const std::string& payload,
                  const std::shared_ptr<Session>& session);
  void on_connection_end(const std::string& reason);
  void park(std::shared_ptr<Connection> connection) { owner_.park(std::move(connection)); }
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }

 private:
  void end_sessions();

  LinkOwner& owner_;
  const Id peer_;
  const Nanoseconds heartbeat_;
  std::vector<std::shared_ptr<Connection>> connections_;  // fixed once started

  std::mutex mutex_;
  std::map<uint32_t, std::shared_ptr<Session>> sessions_;  // guarded by mutex_, like the rest
  int ends_ = 0;                                           // connections that have ended
  std::string reason_;                                     // of the first
  Clock::time_point first_end_{};
  std::atomic<bool> ended_{false};  // all connections
};

}  // namespace pycoll::tcp
