// The two ends of a FIFO in the receiver's segment.
//
// Sender and receiver each count on their own and publish the count: `published` (sender) and
// `released` (receiver). Release/acquire on `published` carries the payload to the receiver;
// release/acquire on `released` carries "I have read it" back, so that the slot may be overwritten.
#pragma once

#include "core/error.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/layout.h"

namespace pycoll::shm {

// Where an end finds its FIFO, and whom it wakes.
struct FifoPlace {
  std::byte* segment = nullptr;  // the receiver's
  const Layout* layout = nullptr;
  int sender = 0;  // index in the receiver's segment
  int channel = 0;
  std::atomic<uint32_t>* other_side_sleeping = nullptr;

  FifoControl& control() const {
    return *reinterpret_cast<FifoControl*>(segment + layout->fifo(sender, channel));
  }
  std::byte* slot(uint32_t message) const {
    return segment + layout->slot(sender, channel, message);
  }
  uint32_t depth() const { return layout->depth(channel); }
};

class ShmSendEnd final : public SendEnd {
 public:
  explicit ShmSendEnd(const FifoPlace& place) : place_(place) {}

  std::byte* acquire() override {
    // Look at the peer's counter only when the copy of it says the FIFO is full: it is a cache
    // miss.
    if (published_ - released_seen_ >= place_.depth()) {
      // Acquire: pairs with release(): the receiver is done reading the slot that is overwritten
      // next.
      released_seen_ = place_.control().released.load(std::memory_order_acquire);
      if (published_ - released_seen_ >= place_.depth()) return nullptr;
    }
    return place_.slot(published_) + sizeof(SlotHeader);
  }

  void publish(const MessageTag& tag) override {
    reinterpret_cast<SlotHeader*>(place_.slot(published_))->tag = tag;
    // Release: tag and payload before the count that says they are there.
    place_.control().published.store(++published_, std::memory_order_release);
    wake_if_sleeping(*place_.other_side_sleeping);
  }

 private:
  FifoPlace place_;
  uint32_t published_ = 0;
  uint32_t released_seen_ = 0;
};

class ShmRecvEnd final : public RecvEnd {
 public:
  explicit ShmRecvEnd(const FifoPlace& place) : place_(place) {}

  std::optional<Message> peek() override {
    if (published_seen_ == released_) {
      // Acquire: pairs with publish(): the payload is there when the count is.
      published_seen_ = place_.control().published.load(std::memory_order_acquire);
      if (published_seen_ == released_) return std::nullopt;
    }
    const std::byte* slot = place_.slot(released_);
    Message message{slot + sizeof(SlotHeader), reinterpret_cast<const SlotHeader*>(slot)->tag};
    if (message.tag.bytes > place_.layout->geometry().slot_bytes) {
      fail(ErrorKind::system, "a message of ", message.tag.bytes, " bytes from rank ",
           place_.sender, " does not fit its slot of ", place_.layout->geometry().slot_bytes,
           " bytes: the sender's memory is corrupt");
    }
    return message;
  }

  void release() override {
    // Release: our reads of the slot before the count that lets the sender overwrite it.
    place_.control().released.store(++released_, std::memory_order_release);
    wake_if_sleeping(*place_.other_side_sleeping);
  }

 private:
  FifoPlace place_;
  uint32_t published_seen_ = 0;
  uint32_t released_ = 0;
};

}  // namespace pycoll::shm
