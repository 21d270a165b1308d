#include "transport/tcp/session.h"

#include "core/error.h"
#include "transport/tcp/link.h"

namespace pycoll::tcp {
namespace {

// Point-to-point messages have one FIFO, and no rounds of several that are under way at once: by
// the time a credit is back, the sender must not have run dry.
constexpr uint32_t kDeeper = 4;

Mapping reserve(size_t bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) fail(ErrorKind::system, errno_text("mmap of message slots"));
  return {base, bytes};
}

}  // namespace

Session::Session(SessionKey key, uint32_t number, const TransportGeometry& geometry,
                 std::shared_ptr<Board> board)
    : key_(std::move(key)), number_(number), board_(std::move(board)) {
  if (geometry.fifo_depth == 0 || geometry.fifo_depth > kMaxDepth) {
    fail(ErrorKind::invalid_argument, "a FIFO of ", geometry.fifo_depth, " messages: 1 to ",
         kMaxDepth, " are possible over TCP");
  }
  const auto depth_of = [&](int channel) {
    return channel == kMessageChannel ? std::min(geometry.fifo_depth * kDeeper, kMaxDepth)
                                      : geometry.fifo_depth;
  };
  // Pages come with their first use: channels that no algorithm uses cost nothing.
  memory_ =
      reserve(geometry.slot_bytes * (kMaxChannels * depth_of(0) + depth_of(kMessageChannel)) * 2);
  std::byte* place = memory_.data();
  for (int channel = 0; channel < kFifoChannels; ++channel) {
    const uint32_t depth = depth_of(channel);
    const size_t fifo_bytes = geometry.slot_bytes * depth;
    senders_.emplace_back(*this, channel, Slots{place, geometry.slot_bytes, depth});
    place += fifo_bytes;
    receivers_.emplace_back(*this, channel, Slots{place, geometry.slot_bytes, depth});
    place += fifo_bytes;
  }
}

void Session::open(std::shared_ptr<Link> link, uint32_t remote_number) {
  link_ = std::move(link);
  remote_number_ = remote_number;
  // Release: pairs with is_open().
  open_.store(true, std::memory_order_release);
  board_->ring();
}

void Session::send_message(FrameHeader header, const std::byte* payload, SendSlot slot) {
  std::optional<CallHeader> call;
  if (!call_shown_) call = board_->call();
  call_shown_ = true;
  header.session = remote_number_;
  link_->send({header, call, {payload, header.bytes}, slot, {}, nullptr}, *this);
}

void Session::send_control(FrameHeader header, const std::string& payload,
                           const std::optional<CallHeader>& call) {
  if (!is_open()) return;
  header.session = remote_number_;
  header.bytes = static_cast<uint32_t>(payload.size());
  link_->send({header, call, {}, {}, payload, nullptr}, *this);
}

void Session::send_credit(int channel) {
  FrameHeader header;
  header.kind = FrameKind::credit;
  header.channel = static_cast<uint8_t>(channel);
  header.released = receiver(channel).take_released();
  send_control(header, "");
}

void Session::report_credits() {
  for (int channel = 0; channel < kFifoChannels; ++channel) {
    if (receiver(channel).has_unreported()) send_credit(channel);
  }
}

void Session::say_ready(int stage) {
  FrameHeader header;
  header.kind = FrameKind::ready;
  header.index = static_cast<uint32_t>(stage);
  send_control(header, "");
}

void Session::inquire() {
  FrameHeader header;
  header.kind = FrameKind::inquire;
  const auto call = board_->call();
  if (call) header.index = static_cast<uint32_t>(call->sequence);
  send_control(header, "", call);
}

void Session::show_elsewhere(const CallHeader& call, bool always) {
  const auto theirs = latest_call();
  if (!always && (!theirs || theirs->sequence < call.sequence)) return;
  FrameHeader header;
  header.kind = FrameKind::call;
  send_control(header, "", call);
}

void Session::poll() {
  link_->poll();
}

void Session::rearm() {
  link_->rearm();
}

void Session::stop_reading() {
  link_->stop_reading(*this);
}

void Session::stop_sending() {
  link_->stop_sending(*this);
}

void Session::send_abort(const std::string& reason) {
  FrameHeader header;
  header.kind = FrameKind::abort;
  send_control(header, reason.substr(0, kControlBytes));
}

void Session::leave() {
  if (!is_open() || left_.exchange(true)) return;
  FrameHeader header;
  header.kind = FrameKind::leave;
  header.session = remote_number_;
  link_->send_on_all(header);
}

std::string Session::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

std::optional<CallHeader> Session::call_of(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  const CallHeader& call = calls_[sequence % calls_.size()];
  if (sequence == 0 || call.sequence != sequence) return std::nullopt;
  return call;
}

std::optional<CallHeader> Session::latest_call() const {
  const std::lock_guard lock(mutex_);
  if (latest_call_ == 0) return std::nullopt;
  return calls_[latest_call_ % calls_.size()];
}

std::byte* Session::begin_message(const FrameHeader& header) {
  if (header.channel >= kFifoChannels || header.wire > static_cast<uint8_t>(Wire::partial)) {
    fail(ErrorKind::peer_failed, "it sent a message on channel ", int{header.channel}, " of kind ",
         int{header.wire});
  }
  sender(header.channel).note_released(header.released);
  return receiver(header.channel).begin(header);
}

void Session::end_message(const FrameHeader& header) {
  receiver(header.channel).end(header);
  board_->ring();
}

void Session::on_control(const FrameHeader& header, const std::string& payload, int connections) {
  switch (header.kind) {
    case FrameKind::credit:
      if (header.channel >= kFifoChannels) fail(ErrorKind::peer_failed, "no such channel");
      sender(header.channel).note_released(header.released);
      break;
    case FrameKind::ready:
      ready_stage_.store(static_cast<int>(header.index), std::memory_order_release);
      break;
    case FrameKind::inquire: {
      FrameHeader answer;
      answer.kind = FrameKind::call;
      if (const auto call = board_->answer_to(header.index)) send_control(answer, "", call);
      break;
    }
    case FrameKind::abort:
      board_->note_abort(payload);
      break;
    case FrameKind::leave:
      // What it sent on other connections may still be on its way.
      if (goodbyes_.fetch_add(1, std::memory_order_acq_rel) + 1 < connections) return;
      end("");
      return;
    default:
      break;
  }
  board_->ring();
}

void Session::note_call(const CallHeader& call) {
  if (call.sequence == 0) return;
  const std::lock_guard lock(mutex_);
  if (call.sequence < latest_call_ && latest_call_ - call.sequence >= calls_.size()) return;
  calls_[call.sequence % calls_.size()] = call;
  latest_call_ = std::max(latest_call_, call.sequence);
}

void Session::end(const std::string& reason) {
  if (!is_open()) {
    refused_.store(true, std::memory_order_release);
  } else {
    const std::lock_guard lock(mutex_);
    if (state() != PeerState::alive) return;  // the first word stands
    reason_ = reason;
    const bool goodbye = goodbyes_.load(std::memory_order_acquire) > 0;
    // Release: pairs with state(): whoever sees it sees all messages that came before.
    state_.store(goodbye ? PeerState::left : PeerState::died, std::memory_order_release);
  }
  board_->ring();
}

}  // namespace pycoll::tcp
