// Takes a stream of bytes apart into frames. Message payloads are read straight into their slots.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "transport/tcp/frame.h"

namespace pycoll::tcp {

class Link;
class Session;

class FrameReader {
 public:
  enum class Result { nothing, some, all, end };
  // One read of the socket, and all frames that are complete by then. `all`: the socket is empty.
  // Throws Error when the peer breaks the rules. errno says why at `end`; 0: an orderly end.
  Result read(int socket, Link& link);
  // A payload of that session that is being read goes nowhere from here on.
  void skip_payload_of(const Session& session);
  // Nothing is read any more: gives up the session, which itself keeps the link of this reader.
  std::shared_ptr<Session> let_go();

 private:
  enum class Phase { header, call, payload };

  void take(Link& link);
  bool take_plain(void* to, size_t bytes);
  void begin_frame(Link& link);
  void begin_payload();
  void end_frame(Link& link);

  // Small, because what lands here is copied once more.
  std::array<std::byte, 4096> staged_;
  size_t begin_ = 0;
  size_t end_ = 0;

  Phase phase_ = Phase::header;
  FrameHeader header_;
  CallHeader call_;
  std::shared_ptr<Session> session_;  // of the frame; kept, as the next one is often of the same
  std::byte* destination_ = nullptr;  // of the rest of the payload; nullptr: skip it
  size_t left_ = 0;
  bool is_message_ = false;
  std::vector<char> control_;
};

}  // namespace pycoll::tcp
