#include "runtime/messages.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "kernels/codec.h"

namespace pycoll {
namespace {

// All that is not a collective's: no CallHeader hashes to it with the same FIFO.
constexpr uint32_t kFingerprint = 0x703270;
// How far a sender may be ahead of its receiver's receives, and what a message costs beside its
// payload: 1 MiB, or 4096 messages.
constexpr uint64_t kRunAhead = 1 << 20;
constexpr uint64_t kMessageCost = 256;
// Larger messages are not worth a copy at the receiver.
constexpr uint64_t kLargestEager = 64 << 10;

std::string size_text(DType dtype, uint64_t bytes, const MessageCode& code) {
  if (code.codec == 0) return concat(bytes / size_of(dtype), " x ", name_of(dtype));
  return concat(code.count, " x ", name_of(code.dtype),
                " over codes: ", describe_wire_tag(code.codec));
}
constexpr auto kMustAgree =
    "Both sides must give the same dtype, number of elements and codec; nothing was ";

}  // namespace

std::string MessageOperation::describe() const {
  const std::string what = concat(" (tag ", tag_, ", ", size_text(dtype_, bytes(), code_), ")");
  if (!receives_) return concat("send to rank ", peer_, what);
  if (peer_ == kAnySource) return concat("recv from any rank", what);
  return concat("recv from rank ", peer_, what);
}

// What to do with each kind: a row a kind.
struct MessageEngine::HandlerTable {
  static constexpr Handler kHandlers[static_cast<size_t>(Kind::kCount)] = {
      &MessageEngine::announced,  // eager
      &MessageEngine::announced,  // request
      &MessageEngine::on_grant,   // grant
      &MessageEngine::on_data,    // data
      &MessageEngine::on_refuse,  // refuse
      &MessageEngine::on_credit,  // credit
  };
};

MessageEngine::MessageEngine(Transport& transport, const TransportGeometry& geometry, int rank,
                             int world_size)
    : transport_(transport),
      slot_payload_(geometry.slot_bytes - sizeof(Header)),
      eager_limit_(std::min(slot_payload_, kLargestEager)),
      rank_(rank),
      world_size_(world_size),
      peers_(static_cast<size_t>(world_size)) {}

uint64_t MessageEngine::cost_of(Kind kind, uint64_t bytes) {
  return kMessageCost + (kind == Kind::eager ? bytes : 0);
}

void MessageEngine::post(Pointer operation) {
  operation->place_ = pending_.insert(pending_.end(), operation);
  if (!operation->receives_) {
    peer_of(operation->peer_).queue.push_back(std::move(operation));
    return;
  }
  const auto fits = [&](const Unexpected& message) {
    return message.header.tag == operation->tag_ &&
           (operation->peer_ == kAnySource || operation->peer_ == message.peer);
  };
  const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), fits);
  if (found == unexpected_.end()) {
    receives_.push_back(std::move(operation));
    return;
  }
  const Unexpected message = std::move(*found);
  unexpected_.erase(found);
  match(operation, {message.peer, message.header, message.payload.data(), message.payload.size()});
  // When that was all, nobody looks again before the next message of this rank: its peer must not
  // wait for that.
  return_credit(peer_of(message.peer));
}

bool MessageEngine::advance() {
  bool moved = false;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    while (receive_from(peer)) moved = true;
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    return_credit(peer_of(peer));
    while (send_to(peer)) moved = true;
  }
  return moved;
}

// ---- Receiving ----

void MessageEngine::nonsense(const Arrived& arrived, const char* what) const {
  fail(ErrorKind::system, "rank ", rank_, " received a point-to-point message from rank ",
       arrived.peer, " that ", what, ": that rank's memory is corrupt, or it runs other code");
}

bool MessageEngine::receive_from(int peer) {
  RecvEnd& fifo = transport_.receiver(peer, kMessageChannel);
  const std::optional<Message> message = fifo.peek();
  if (!message) return false;
  Arrived arrived{peer, {}, message->data + sizeof(Header), message->tag.bytes - sizeof(Header)};
  if (message->tag.fingerprint != kFingerprint || message->tag.bytes < sizeof(Header)) {
    nonsense(arrived, "has no header");
  }
  std::memcpy(&arrived.header, message->data, sizeof(Header));
  const Header& header = arrived.header;
  const bool known = header.kind < Kind::kCount && header.dtype < DType::kCount;
  if (!known || header.coded >= DType::kCount) nonsense(arrived, "is unknown");

  Peer& from = peer_of(peer);
  const uint64_t freed = header.returned - from.returned;
  if (freed > from.spent - from.returned)
    nonsense(arrived, "returns more credit than it was given");
  from.returned = header.returned;
  (this->*HandlerTable::kHandlers[static_cast<size_t>(header.kind)])(arrived);
  fifo.release();
  return true;
}

void MessageEngine::announced(const Arrived& arrived) {
  const Header& header = arrived.header;
  Peer& from = peer_of(arrived.peer);
  const bool eager = header.kind == Kind::eager;
  if (arrived.payload_bytes != (eager ? header.bytes : 0)) nonsense(arrived, "has another length");
  from.arrived += cost_of(header.kind, header.bytes);
  if (from.arrived - from.matched > kRunAhead) nonsense(arrived, "exceeds its credit");

  const auto fits = [&](const Pointer& receive) {
    return receive->tag_ == header.tag &&
           (receive->peer_ == kAnySource || receive->peer_ == arrived.peer);
  };
  const auto found = std::find_if(receives_.begin(), receives_.end(), fits);
  if (found == receives_.end()) {
    const std::byte* payload = arrived.payload;
    unexpected_.push_back({arrived.peer, header, {payload, payload + arrived.payload_bytes}});
    return;
  }
  const Pointer receive = *found;
  receives_.erase(found);
  match(receive, arrived);
}

void MessageEngine::match(const Pointer& receive, const Arrived& arrived) {
  const Header& header = arrived.header;
  Peer& from = peer_of(arrived.peer);
  from.matched += cost_of(header.kind, header.bytes);
  receive->source_ = arrived.peer;
  const bool eager = header.kind == Kind::eager;
  const MessageCode code = code_of(header);
  const bool same = header.dtype == receive->dtype_ && header.bytes == receive->bytes();
  if (!same || code != receive->code_) {
    if (!eager) {
      Header refusal{.kind = Kind::refuse,
                     .dtype = receive->dtype_,
                     .tag = header.tag,
                     .bytes = receive->bytes(),
                     .id = header.id};
      set_code(refusal, receive->code_);
      control(arrived.peer, refusal);
    }
    const std::string text =
        concat("rank ", rank_, ": ", receive->describe(), " matched a message of ",
               size_text(header.dtype, header.bytes, code), " from rank ", arrived.peer, ". ",
               kMustAgree, "received");
    finish(receive, std::make_exception_ptr(Error(ErrorKind::mismatch, text)));
    return;
  }
  if (eager) {
    if (header.bytes > 0) std::memcpy(receive->block_.data, arrived.payload, header.bytes);
    finish(receive, nullptr);
    return;
  }
  if (!from.incoming.emplace(header.id, receive).second) nonsense(arrived, "has an id in use");
  control(arrived.peer, {.kind = Kind::grant, .id = header.id});
}

void MessageEngine::on_data(const Arrived& arrived) {
  Peer& from = peer_of(arrived.peer);
  const auto found = from.incoming.find(arrived.header.id);
  if (found == from.incoming.end()) nonsense(arrived, "nobody asked for");
  const Pointer receive = found->second;
  const bool fits = arrived.header.offset == receive->moved_ &&
                    arrived.payload_bytes <= receive->bytes() - receive->moved_;
  if (!fits) nonsense(arrived, "is not the next slice");
  std::memcpy(receive->block_.data + receive->moved_, arrived.payload, arrived.payload_bytes);
  receive->moved_ += arrived.payload_bytes;
  if (receive->moved_ < receive->bytes()) return;
  from.incoming.erase(found);
  finish(receive, nullptr);
}

// The count is told late, with whatever travels, unless the peer may be short of credit.
void MessageEngine::return_credit(Peer& peer) {
  if (peer.matched == peer.told || peer.arrived - peer.told <= kRunAhead / 2) return;
  if (!peer.controls.empty()) return;  // they carry it
  control(static_cast<int>(&peer - peers_.data()), {.kind = Kind::credit});
}

// ---- Sending ----

void MessageEngine::on_grant(const Arrived& arrived) {
  Peer& to = peer_of(arrived.peer);
  auto node = to.requested.extract(arrived.header.id);
  if (node.empty()) nonsense(arrived, "grants what was not requested");
  to.granted.emplace_back(arrived.header.id, std::move(node.mapped()));
}

void MessageEngine::on_refuse(const Arrived& arrived) {
  auto node = peer_of(arrived.peer).requested.extract(arrived.header.id);
  if (node.empty()) nonsense(arrived, "refuses what was not requested");
  const Header& header = arrived.header;
  const std::string text =
      concat("rank ", rank_, ": ", node.mapped()->describe(), " met a receive of ",
             size_text(header.dtype, header.bytes, code_of(header)), " on rank ", arrived.peer,
             ". ", kMustAgree, "sent");
  finish(node.mapped(), std::make_exception_ptr(Error(ErrorKind::mismatch, text)));
}

void MessageEngine::control(int peer, const Header& header) {
  peer_of(peer).controls.push_back(header);
  ++controls_waiting_;
}

bool MessageEngine::send_to(int peer) {
  Peer& to = peer_of(peer);
  if (to.controls.empty() && to.granted.empty() && to.queue.empty()) return false;
  std::byte* room = transport_.sender(peer, kMessageChannel).acquire();
  if (room == nullptr) return false;
  if (!to.controls.empty()) {
    const Header header = to.controls.front();
    to.controls.pop_front();
    --controls_waiting_;
    publish(peer, room, header, nullptr, 0);
    return true;
  }
  if (to.granted.empty()) return announce(peer, room);
  const auto [id, send] = to.granted.front();
  const uint64_t slice = std::min(slot_payload_, send->bytes() - send->moved_);
  const Header header{.kind = Kind::data, .dtype = send->dtype_, .id = id, .offset = send->moved_};
  publish(peer, room, header, send->block_.data + send->moved_, slice);
  send->moved_ += slice;
  if (send->moved_ == send->bytes()) {
    to.granted.pop_front();
    finish(send, nullptr);
  }
  return true;
}

// The oldest send that its receiver does not know of, if there is credit for it.
bool MessageEngine::announce(int peer, std::byte* room) {
  Peer& to = peer_of(peer);
  const Pointer send = to.queue.front();
  const uint64_t bytes = send->bytes();
  const uint64_t credit = kRunAhead - (to.spent - to.returned);
  const bool eager = bytes <= eager_limit_ && cost_of(Kind::eager, bytes) <= credit;
  const Kind kind = eager ? Kind::eager : Kind::request;
  if (cost_of(kind, bytes) > credit) return false;
  to.spent += cost_of(kind, bytes);
  to.queue.pop_front();
  Header header{.kind = kind, .dtype = send->dtype_, .tag = send->tag_, .bytes = bytes};
  set_code(header, send->code_);
  if (eager) {
    publish(peer, room, header, send->block_.data, bytes);
    finish(send, nullptr);
  } else {
    header.id = to.next_id++;
    to.requested.emplace(header.id, send);
    publish(peer, room, header, nullptr, 0);
  }
  return true;
}

void MessageEngine::publish(int peer, std::byte* room, Header header, const std::byte* payload,
                            uint64_t bytes) {
  Peer& to = peer_of(peer);
  header.returned = to.told = to.matched;
  std::memcpy(room, &header, sizeof(header));
  if (bytes > 0) std::memcpy(room + sizeof(header), payload, bytes);
  transport_.sender(peer, kMessageChannel)
      .publish({kFingerprint, static_cast<uint32_t>(sizeof(header) + bytes), Wire::value});
}

// ---- Ends and texts ----

void MessageEngine::finish(const Pointer& operation, std::exception_ptr outcome) {
  operation->outcome_ = std::move(outcome);
  pending_.erase(operation->place_);
  finished_.push_back(operation);
}

std::vector<int> MessageEngine::waiting_for(const MessageOperation& operation) const {
  if (operation.source_ >= 0) return {operation.source_};
  if (operation.peer_ != kAnySource) return {operation.peer_};
  std::vector<int> ranks;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer != rank_) ranks.push_back(peer);
  }
  return ranks;
}

std::string MessageEngine::why_waiting(const MessageOperation& operation) const {
  if (operation.source_ >= 0) {
    return concat(operation.moved_, " bytes have come from rank ", operation.source_);
  }
  if (operation.receives_) {
    if (operation.peer_ == kAnySource) return "no rank has sent a message with that tag";
    return concat("rank ", operation.peer_, " has not sent a message with that tag");
  }
  const Peer& to = peer_of(operation.peer_);
  const auto is_it = [&](const auto& entry) { return entry.second.get() == &operation; };
  if (std::any_of(to.requested.begin(), to.requested.end(), is_it)) {
    return concat("rank ", operation.peer_, " has not posted a matching receive");
  }
  if (std::any_of(to.granted.begin(), to.granted.end(), is_it)) {
    return concat(operation.moved_, " bytes have gone to rank ", operation.peer_);
  }
  return concat("rank ", operation.peer_, " does not receive the ",
                (to.spent - to.returned) / kMessageCost > 0 ? "earlier messages" : "message",
                " of this rank");
}

std::vector<MessageEngine::Pointer> MessageEngine::give_up() {
  std::vector<Pointer> all(pending_.begin(), pending_.end());
  pending_.clear();
  finished_.clear();
  receives_.clear();
  unexpected_.clear();
  controls_waiting_ = 0;
  for (Peer& peer : peers_) peer = Peer{};
  return all;
}

}  // namespace pycoll
