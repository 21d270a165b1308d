#include "transport/tcp/fifo.h"

#include "transport/tcp/session.h"

namespace pycoll::tcp {
namespace {

MessageTag tag_of(const FrameHeader& header) {
  return {header.fingerprint, header.bytes, static_cast<Wire>(header.wire)};
}

}  // namespace

bool TcpSendEnd::has_room() const {
  const uint32_t next = published_.load(std::memory_order_relaxed);
  // Relaxed: nothing of the peer's memory is read or written after that.
  if (next - released_.load(std::memory_order_relaxed) >= slots_.depth) return false;
  // Acquire: whoever sent the slot's last message is done reading it.
  return !busy_[next % slots_.depth].load(std::memory_order_acquire);
}

std::byte* TcpSendEnd::acquire() {
  if (!has_room()) {
    session_.poll();
    if (!has_room()) return nullptr;
  }
  return slots_.of(published_.load(std::memory_order_relaxed));
}

void TcpSendEnd::publish(const MessageTag& tag) {
  send(tag, slots_.of(published_.load(std::memory_order_relaxed)));
}

void TcpSendEnd::send(const MessageTag& tag, const std::byte* payload) {
  const uint32_t index = published_.load(std::memory_order_relaxed);
  FrameHeader header;
  header.kind = FrameKind::data;
  header.channel = static_cast<uint8_t>(channel_);
  header.wire = static_cast<uint8_t>(tag.wire);
  header.index = index;
  header.bytes = tag.bytes;
  header.fingerprint = tag.fingerprint;
  header.released = session_.receiver(channel_).take_released();
  std::atomic<bool>& busy = busy_[index % slots_.depth];
  busy.store(true, std::memory_order_relaxed);
  published_.store(index + 1, std::memory_order_relaxed);
  session_.send_message(header, payload, {slots_.of(index), &busy});
}

bool TcpSendEnd::sent() {
  const std::atomic<bool>& busy =
      busy_[(published_.load(std::memory_order_relaxed) - 1) % slots_.depth];
  // Acquire: whoever wrote the last of the payload is done reading it.
  if (!busy.load(std::memory_order_acquire)) return true;
  session_.poll();
  return !busy.load(std::memory_order_acquire);
}

void TcpSendEnd::recall() {
  session_.stop_sending();
}

void TcpSendEnd::note_released(uint32_t released) {
  const uint32_t published = published_.load(std::memory_order_relaxed);
  if (static_cast<int32_t>(published - released) < 0) {
    fail(ErrorKind::peer_failed, "it gave back ", released, " messages of ", published);
  }
  // Counts come over several connections: an older one may be the later to come.
  uint32_t known = released_.load(std::memory_order_relaxed);
  // Relaxed: the count stands for itself.
  while (static_cast<int32_t>(released - known) > 0 &&
         !released_.compare_exchange_weak(known, released, std::memory_order_relaxed)) {
  }
}

std::optional<Message> TcpRecvEnd::look() {
  const uint32_t next = released_.load(std::memory_order_relaxed);
  SlotState& slot = states_[next % slots_.depth];
  // Acquire: pairs with end(): tag and payload are there.
  if (slot.full.load(std::memory_order_acquire) != next + 1) return std::nullopt;
  return Message{slot.data, slot.tag};
}

std::optional<Message> TcpRecvEnd::peek() {
  if (auto message = look()) return message;
  session_.poll();
  return look();
}

void TcpRecvEnd::release() {
  // Release: our reads of the slot before whoever reads the link may overwrite it.
  released_.store(released_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  if (++unreported_ >= std::max(slots_.depth / 2, 1u)) session_.send_credit(channel_);
}

uint32_t TcpRecvEnd::take_released() {
  unreported_ = 0;
  return released_.load(std::memory_order_relaxed);
}

void TcpRecvEnd::offer(std::byte* to, const MessageTag& tag, uint32_t later) {
  if (later >= slots_.depth) return;
  const uint32_t wanted = released_.load(std::memory_order_relaxed) + later + 1;
  SlotState& slot = states_[(wanted - 1) % slots_.depth];
  // Once: it may have been taken since. And 0 is no offer.
  if (slot.last_offered == wanted || wanted == 0) return;
  slot.last_offered = wanted;
  // Nobody reads the old ones: their message was seen, and this one finds no offer yet.
  slot.offered_data = to;
  slot.offered_tag = tag;
  slot.offered.store(wanted, std::memory_order_release);
}

void TcpRecvEnd::withdraw() {
  for (SlotState& slot : states_) slot.offered.store(0, std::memory_order_relaxed);
  // Who has taken one reads a connection until this returns.
  session_.stop_reading();
}

std::byte* TcpRecvEnd::begin(const FrameHeader& header) {
  if (header.bytes > slots_.slot_bytes) {
    fail(ErrorKind::peer_failed, "it sent a message of ", header.bytes, " bytes, slots have ",
         slots_.slot_bytes);
  }
  // Acquire: pairs with release().
  const uint32_t released = released_.load(std::memory_order_acquire);
  if (header.index - released >= slots_.depth) {
    fail(ErrorKind::peer_failed, "it sent message ", header.index, " when only ", slots_.depth,
         " from ", released, " on had room");
  }
  SlotState& slot = states_[header.index % slots_.depth];
  if (slot.claimed.exchange(header.index + 1, std::memory_order_relaxed) == header.index + 1) {
    fail(ErrorKind::peer_failed, "it sent message ", header.index, " twice");
  }
  slot.data = slots_.of(header.index);
  uint32_t number = header.index + 1;
  // Acquire: pairs with offer(). Exchanged, because withdraw() may be under way.
  if (header.bytes > 0 && number != 0 && slot.offered.load(std::memory_order_acquire) == number &&
      tag_of(header) == slot.offered_tag &&
      slot.offered.compare_exchange_strong(number, 0, std::memory_order_relaxed)) {
    slot.data = slot.offered_data;
  }
  return slot.data;
}

void TcpRecvEnd::end(const FrameHeader& header) {
  SlotState& slot = states_[header.index % slots_.depth];
  slot.tag = tag_of(header);
  slot.full.store(header.index + 1, std::memory_order_release);
}

}  // namespace pycoll::tcp
