// One socket of a link: frames in both directions, none of which ever waits.
//
// Whoever has something to send writes at once, in its own thread; what the kernel does not take is
// finished by the IO thread, or by a driving thread that looks again. Whoever looks for messages
// reads the socket itself; the IO thread reads when nobody looks. While somebody looks, the IO
// thread takes its interest in the socket away ("parked"), else it would be woken by every message
// and by all room in the send buffer, and compete for the CPU; a driver that goes to sleep gives it
// back, and so does time.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "transport/tcp/descriptors.h"
#include "transport/tcp/frame_reader.h"
#include "transport/tcp/io_thread.h"

namespace pycoll::tcp {

class Link;
class Session;

struct Outgoing {
  FrameHeader header;
  std::optional<CallHeader> call;
  std::span<const std::byte> payload;  // of a message
  SendSlot slot;
  std::string text;                // the payload of everything else
  std::shared_ptr<Session> owner;  // of the slot, once the frame has to wait

  void done() const {
    // Release: our reads of the slot come before its reuse.
    if (slot.busy != nullptr) slot.busy->store(false, std::memory_order_release);
  }
  // The payload waits in its slot, but for what was sent of the frame.
  void move_to_slot(size_t sent);
};

class Connection final : public IoHandler, public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::weak_ptr<Link> link, Socket socket, IoThread& io);
  ~Connection() override;

  // The IO thread serves it from then on.
  void start();

  // Any thread. Frames keep their order. `owner` may be nullptr when there is no payload.
  void send(Outgoing&& frame, Session* owner);
  // Reads and writes what can be without waiting. True when something came.
  bool poll(Link& link);
  // A driver stops looking.
  void rearm();
  // Payloads of that session are written and read no more (Session::stop_reading()).
  void stop_reading(const Session& session);
  void stop_sending(const Session& session);
  // No frame of ours is on its way: the peer's kernel has acknowledged all. Also when it ended.
  bool drained();
  // The peer's host is silent for longer than that although something is due.
  bool is_lost(Nanoseconds heartbeat);
  // In the IO thread. False when the connection is not parked any more.
  bool unpark_when_unused();
  // Ends it for both sides; what has come is still read.
  void shut();
  void close();
  bool has_ended() const { return ended_.load(std::memory_order_acquire); }

  void on_events(uint32_t events) override;

 private:
  void note_end(Link& link, const std::string& reason);
  // The first two under tx_mutex_, the next under rx_mutex_.
  void flush();
  bool write_some(Outgoing& frame, size_t& sent);
  std::optional<std::string> read_some(Link& link, bool& came);
  void set_interest(uint32_t add, uint32_t remove);
  void set_parked(bool parked);
  void apply_interest();  // under interest_mutex_
  bool looked_at(Clock::time_point now) const;

  const std::weak_ptr<Link> link_;
  IoThread& io_;
  uint64_t registration_ = 0;
  std::atomic<int64_t> last_poll_{0};  // a driver's, in Clock ticks
  std::atomic<bool> parked_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> closed_{false};

  std::mutex rx_mutex_;
  FrameReader reader_;  // guarded by rx_mutex_

  std::mutex tx_mutex_;
  std::deque<Outgoing> queue_;           // guarded by tx_mutex_
  size_t sent_ = 0;                      // of the first of them
  bool broken_ = false;                  // the peer takes no more
  std::atomic<bool> tx_waiting_{false};  // queue_ is not empty

  std::mutex interest_mutex_;  // a leaf
  uint32_t interest_ = 0;      // guarded by interest_mutex_; of a parked connection in vain
  uint32_t registered_interest_ = 0;

  Socket socket_;
};

}  // namespace pycoll::tcp
