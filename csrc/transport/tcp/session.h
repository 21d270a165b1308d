// One group's traffic between this rank and one peer, over the link between their processes.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <mutex>

#include "core/fd.h"
#include "transport/tcp/board.h"
#include "transport/tcp/fifo.h"
#include "transport/tcp/frame.h"

namespace pycoll::tcp {

class Link;

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(SessionKey key, uint32_t number, const TransportGeometry& geometry,
          std::shared_ptr<Board> board);

  const SessionKey& key() const { return key_; }
  uint32_t number() const { return number_; }

  // Before it is open: once a link, the last one stands.
  void open(std::shared_ptr<Link> link, uint32_t remote_number);
  bool is_open() const { return open_.load(std::memory_order_acquire); }
  // The peer's rank has given the group up before this was open.
  bool is_unwanted() const { return !is_open() && goodbyes_.load(std::memory_order_acquire) > 0; }
  // The link over which it was asked for has ended: ask again. Once.
  bool take_refusal() { return refused_.exchange(false, std::memory_order_acq_rel); }

  // ---- The driving thread, once open ----
  TcpSendEnd& sender(int channel) { return senders_[static_cast<size_t>(channel)]; }
  TcpRecvEnd& receiver(int channel) { return receivers_[static_cast<size_t>(channel)]; }
  // Sends a message whose payload may lie anywhere; `slot` is in use until the kernel has it all.
  void send_message(FrameHeader header, const std::byte* payload, SendSlot slot);
  void send_credit(int channel);
  void report_credits();
  void say_ready(int stage);
  void inquire();
  // The peer has not been shown this rank's current call.
  void call_changed() { call_shown_ = false; }
  // Reads and writes what can be without waiting.
  void poll();
  void rearm();
  // The group is given up: payloads that are being read go nowhere from here on, and the rest of
  // those that are being sent comes out of their slots.
  void stop_reading();
  void stop_sending();

  // ---- Any thread ----
  // A call that is carried out elsewhere, if the peer has shown one of that number or a later one:
  // it may wait in it. Else it is told when it asks. `always`: it may wait elsewhere.
  void show_elsewhere(const CallHeader& call, bool always);
  void send_abort(const std::string& reason);
  void leave();
  PeerState state() const { return state_.load(std::memory_order_acquire); }
  std::string reason() const;
  int ready_stage() const { return ready_stage_.load(std::memory_order_acquire); }
  std::optional<CallHeader> call_of(uint64_t sequence) const;
  std::optional<CallHeader> latest_call() const;
  Board& board() { return *board_; }
  std::shared_ptr<Link> link() const { return link_; }

  // ---- Whoever reads a connection of the link ----
  // Where the payload of a message goes. Both throw Error when the peer breaks the rules.
  std::byte* begin_message(const FrameHeader& header);
  void end_message(const FrameHeader& header);
  void on_control(const FrameHeader& header, const std::string& payload, int connections);
  void note_call(const CallHeader& call);
  void end(const std::string& reason);

 private:
  void send_control(FrameHeader header, const std::string& payload,
                    const std::optional<CallHeader>& call = std::nullopt);

  const SessionKey key_;
  const uint32_t number_;
  const std::shared_ptr<Board> board_;
  Mapping memory_;
  std::deque<TcpSendEnd> senders_;
  std::deque<TcpRecvEnd> receivers_;

  std::shared_ptr<Link> link_;  // these two are written before open_ is
  uint32_t remote_number_ = 0;
  std::atomic<bool> open_{false};
  std::atomic<bool> refused_{false};
  bool call_shown_ = true;  // the driving thread's

  std::atomic<bool> left_{false};  // this rank
  std::atomic<int> goodbyes_{0};   // connections on which the peer's `leave` came
  std::atomic<int> ready_stage_{0};
  std::atomic<PeerState> state_{PeerState::alive};
  mutable std::mutex mutex_;
  std::string reason_;                  // guarded by mutex_, like the rest
  std::array<CallHeader, 64> calls_{};  // by sequence % 64
  uint64_t latest_call_ = 0;
};

}  // namespace pycoll::tcp
