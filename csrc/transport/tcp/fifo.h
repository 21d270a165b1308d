// The two ends of a FIFO over a link.
//
// The receiver has `depth` slots, message i goes into slot i % depth. Messages may come over any
// connection of the link, in any order; a slot says which message it holds. The sender keeps copies
// in as many slots of its own until they are on their way; it never has more than `depth` messages
// out that the receiver has not given back (credits), so a message always finds its slot free.
#pragma once

#include <array>
#include <atomic>

#include "core/error.h"
#include "transport/tcp/frame.h"
#include "transport/transport.h"

namespace pycoll::tcp {

constexpr uint32_t kMaxDepth = 64;

class Session;

struct Slots {
  std::byte* base = nullptr;
  uint64_t slot_bytes = 0;
  uint32_t depth = 0;

  std::byte* of(uint32_t message) const { return base + (message % depth) * slot_bytes; }
};

class TcpSendEnd final : public SendEnd {
 public:
  TcpSendEnd(Session& session, int channel, const Slots& slots)
      : session_(session), channel_(channel), slots_(slots) {}

  std::byte* acquire() override;
  void publish(const MessageTag& tag) override;
  void send(const MessageTag& tag, const std::byte* payload) override;
  bool sent() override;
  void recall() override;

  // By whoever reads the link: the receiver has given back that many. Throws Error when it cannot
  // have.
  void note_released(uint32_t released);

 private:
  bool has_room() const;

  Session& session_;
  int channel_;
  Slots slots_;
  // Writer: the driving thread. Relaxed: only a lying peer could give back what it has not got.
  std::atomic<uint32_t> published_{0};
  std::atomic<uint32_t> released_{0};  // writers: readers of the link
  // Set while the slot's bytes are not all with the kernel. Cleared with release by who sent the
  // last: the slot is overwritten after that.
  std::array<std::atomic<bool>, kMaxDepth> busy_{};
};

class TcpRecvEnd final : public RecvEnd {
 public:
  TcpRecvEnd(Session& session, int channel, const Slots& slots)
      : session_(session), channel_(channel), slots_(slots) {}

  std::optional<Message> peek() override;
  void release() override;
  void offer(std::byte* to, const MessageTag& tag, uint32_t later) override;
  void withdraw() override;

  // By the driving thread: the count to report, which thereby counts as reported.
  uint32_t take_released();
  bool has_unreported() const { return unreported_ > 0; }

  // By whoever reads a connection: where the message goes, and that it is there. Throws Error when
  // the peer breaks the rules.
  std::byte* begin(const FrameHeader& header);
  void end(const FrameHeader& header);

 private:
  std::optional<Message> look();

  struct SlotState {
    // Message number + 1. `claimed` keeps two connections from filling one slot at a time.
    std::atomic<uint32_t> claimed{0};
    std::atomic<uint32_t> full{0};
    MessageTag tag;  // these two are written before `full`
    std::byte* data = nullptr;
    // Where the driving thread wants the message whose number + 1 is `offered`, if it is like that
    // one. Who takes the offer clears `offered`.
    std::atomic<uint32_t> offered{0};
    std::byte* offered_data = nullptr;
    MessageTag offered_tag;
    uint32_t last_offered = 0;  // the driving thread's
  };

  Session& session_;
  int channel_;
  Slots slots_;
  std::atomic<uint32_t> released_{0};  // writer: the driving thread
  uint32_t unreported_ = 0;            // the driving thread's
  std::array<SlotState, kMaxDepth> states_{};
};

}  // namespace pycoll::tcp
