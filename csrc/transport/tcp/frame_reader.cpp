#include "transport/tcp/frame_reader.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "transport/tcp/link.h"
#include "transport/tcp/session.h"

namespace pycoll::tcp {

FrameReader::Result FrameReader::read(int socket, Link& link) {
  // While a payload is being read, nothing is staged; what follows it is read in the same go.
  const bool direct = phase_ == Phase::payload && destination_ != nullptr;
  iovec parts[2];
  int count = 0;
  size_t wanted = staged_.size() - end_;
  if (direct) parts[count++] = {destination_, left_};
  parts[count++] = {staged_.data() + end_, wanted};
  if (direct) wanted += left_;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<size_t>(count);
  ssize_t got;
  do {
    got = ::recvmsg(socket, &message, MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Result::nothing;
  if (got <= 0) {
    if (got == 0) errno = 0;
    return Result::end;
  }
  auto bytes = static_cast<size_t>(got);
  const bool all = bytes < wanted;
  if (direct) {
    const size_t taken = std::min(bytes, left_);
    destination_ += taken;
    left_ -= taken;
    bytes -= taken;
  }
  end_ += bytes;
  take(link);
  return all ? Result::all : Result::some;
}

void FrameReader::skip_payload_of(const Session& session) {
  if (is_message_ && session_.get() == &session) destination_ = nullptr;
}

std::shared_ptr<Session> FrameReader::let_go() {
  return std::move(session_);
}

bool FrameReader::take_plain(void* to, size_t bytes) {
  if (end_ - begin_ < bytes) return false;
  std::memcpy(to, staged_.data() + begin_, bytes);
  begin_ += bytes;
  return true;
}

void FrameReader::take(Link& link) {
  for (;;) {
    if (phase_ == Phase::header) {
      if (!take_plain(&header_, sizeof(header_))) break;
      begin_frame(link);
    }
    if (phase_ == Phase::call) {
      if (!take_plain(&call_, sizeof(call_))) break;
      if (session_) session_->note_call(call_);
      begin_payload();
    }
    if (left_ > 0) {
      const size_t taken = std::min(left_, end_ - begin_);
      // An empty message may have no address.
      if (destination_ != nullptr && taken > 0) {
        std::memcpy(destination_, staged_.data() + begin_, taken);
        destination_ += taken;
      }
      begin_ += taken;
      left_ -= taken;
      if (left_ > 0) break;
    }
    end_frame(link);
  }
  // Less than a header or a call is left, or nothing: room for more than one of each.
  if (begin_ > 0) std::memmove(staged_.data(), staged_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
}

void FrameReader::begin_frame(Link& link) {
  if (header_.magic != kFrameMagic || header_.kind >= FrameKind::kCount || header_.has_call > 1) {
    fail(ErrorKind::peer_failed, "it sent bytes that are no frame");
  }
  is_message_ = header_.kind == FrameKind::data;
  if (!is_message_ && header_.bytes > kControlBytes) {
    fail(ErrorKind::peer_failed, "it sent a control frame of ", header_.bytes, " bytes");
  }
  if (!session_ || session_->number() != header_.session || session_->state() != PeerState::alive)
    session_ = header_.session == 0 ? nullptr : link.find(header_.session);
  if (header_.has_call != 0) {
    phase_ = Phase::call;
  } else {
    begin_payload();
  }
}

void FrameReader::begin_payload() {
  phase_ = Phase::payload;
  left_ = header_.bytes;
  destination_ = nullptr;
  if (is_message_) {
    // Of a session that has ended on this side: skipped.
    if (session_) destination_ = session_->begin_message(header_);
  } else {
    control_.resize(header_.bytes);
    destination_ = reinterpret_cast<std::byte*>(control_.data());
  }
}

void FrameReader::end_frame(Link& link) {
  phase_ = Phase::header;
  if (is_message_) {
    if (session_) session_->end_message(header_);
    return;
  }
  link.on_control(header_, std::string(control_.begin(), control_.end()), session_);
}

}  // namespace pycoll::tcp
