// Point-to-point messages of one group: matching, flow control, delivery.
//
// Every pair of ranks has one FIFO in each direction for this (kMessageChannel). What travels in it
// is a MessageHeader, and the payload behind it:
//
//   eager     a whole small message. The receiver copies it to where a matching receive wants it,
//             or keeps it until one is posted. The sender is done once it is in the FIFO.
//   request   a large message exists; its data stays with the sender until it is granted.
//   grant     a receive has matched that request: send the data.
//   data      one slice of a granted message, in order.
//   refuse    a receive has matched that request, but with another dtype or length.
//   credit    nothing but the count that every header carries.
//
// Matching: messages of one sender are announced (eager or request) in the order of their sends,
// and a receive takes the oldest announced message with its source and tag; a message goes to the
// oldest posted receive that fits it. The order in which the two sides post does not matter.
//
// Nobody runs ahead without bound: announced messages that no receive has matched cost credit
// (their payload and a constant), kRunAhead a pair of ranks. The receiver counts what it has
// matched, and every header takes the count back. A send that finds no credit waits, and those
// behind it.
//
// Nothing here waits, and everything that arrives has a place, so the FIFOs always drain while a
// rank drives; two ranks that send to each other cannot block each other below the credit.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/operation.h"
#include "transport/transport.h"

namespace pycoll {

class MessageEngine {
 public:
  using Pointer = std::shared_ptr<MessageOperation>;

  MessageEngine(Transport& transport, const TransportGeometry& geometry, int rank, int world_size);

  void post(Pointer operation);
  // Does what can be done. True when something moved. Throws Error when a peer sends nonsense.
  bool advance();
  // Operations that have ended since the last call.
  std::vector<Pointer> take_finished() { return std::exchange(finished_, {}); }
  bool has_finished() const { return !finished_.empty(); }
  // How a finished operation ended.
  static std::exception_ptr outcome_of(const MessageOperation& op) { return op.outcome_; }
  // Whether there is anything to drive.
  bool active() const { return !pending_.empty() || controls_waiting_ > 0; }
  const std::list<Pointer>& pending() const { return pending_; }
  // The ranks without whose help the operation does not go on.
  std::vector<int> waiting_for(const MessageOperation& operation) const;
  // What it waits for, in words.
  std::string why_waiting(const MessageOperation& operation) const;
  // Forgets everything; the caller ends the operations, and the group.
  std::vector<Pointer> give_up();

 private:
  enum class Kind : uint8_t { eager, request, grant, data, refuse, credit, kCount };

  // Plain data at the start of every message; 48 bytes, so that the smallest slots still carry some
  // payload.
  struct Header {
    Kind kind = Kind::credit;
    DType dtype = DType::uint8;
    // What the bytes are codes of: a MessageCode.
    uint8_t codec = 0;
    DType coded = DType::uint8;
    int32_t tag = 0;
    uint64_t bytes = 0;     // of the whole message; refuse: of the receive, as all before
    uint64_t id = 0;        // of the sender's, for all but eager and credit
    uint64_t offset = 0;    // data: of this slice
    uint64_t returned = 0;  // cost of the receiver's messages that were matched here, ever
    uint64_t values = 0;    // of codes
  };
  static_assert(sizeof(Header) == 48 && std::is_trivially_copyable_v<Header>);

  // A message that was announced before a receive for it was posted.
  struct Unexpected {
    int peer;
    Header header;
    std::vector<std::byte> payload;  // eager
  };

  struct Peer {
    // As a sender.
    std::deque<Pointer> queue;              // not announced yet
    std::map<uint64_t, Pointer> requested;  // announced, not granted
    std::deque<std::pair<uint64_t, Pointer>> granted;
    uint64_t next_id = 1;
    uint64_t spent = 0;     // cost of all that was announced
    uint64_t returned = 0;  // of which the receiver has matched
    // As a receiver.
    std::map<uint64_t, Pointer> incoming;  // granted
    uint64_t arrived = 0;                  // cost of all that was announced to us
    uint64_t matched = 0;                  // of which receives have taken
    uint64_t told = 0;                     // the count that the peer knows
    // Grants, refusals and credits that wait for a slot.
    std::deque<Header> controls;
  };

  static MessageCode code_of(const Header& header) {
    return {header.codec, header.coded, header.values};
  }
  static void set_code(Header& header, const MessageCode& code) {
    header.codec = code.codec;
    header.coded = code.dtype;
    header.values = code.count;
  }

  struct Arrived {
    int peer;
    Header header;
    const std::byte* payload;
    uint64_t payload_bytes;
  };
  using Handler = void (MessageEngine::*)(const Arrived&);
  struct HandlerTable;

  bool receive_from(int peer);
  void announced(const Arrived& arrived);
  void on_grant(const Arrived& arrived);
  void on_data(const Arrived& arrived);
  void on_refuse(const Arrived& arrived);
  void on_credit(const Arrived&) {}
  // A receive and a message have found each other.
  void match(const Pointer& receive, const Arrived& arrived);
  void return_credit(Peer& peer);

  bool send_to(int peer);
  bool announce(int peer, std::byte* room);
  void publish(int peer, std::byte* room, Header header, const std::byte* payload, uint64_t bytes);
  void control(int peer, const Header& header);

  void finish(const Pointer& operation, std::exception_ptr outcome);
  static uint64_t cost_of(Kind kind, uint64_t bytes);
  Peer& peer_of(int rank) { return peers_[static_cast<size_t>(rank)]; }
  const Peer& peer_of(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  [[noreturn]] void nonsense(const Arrived& arrived, const char* what) const;

  Transport& transport_;
  const uint64_t slot_payload_;
  const uint64_t eager_limit_;
  const int rank_;
  const int world_size_;
  std::vector<Peer> peers_;
  std::list<Pointer> receives_;        // posted, not matched; oldest first
  std::deque<Unexpected> unexpected_;  // in the order of arrival
  std::list<Pointer> pending_;         // all that have not ended
  std::vector<Pointer> finished_;
  size_t controls_waiting_ = 0;
};

}  // namespace pycoll
