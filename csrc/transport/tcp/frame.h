// What travels over a connection.
//
//   dialer:  Hello          acceptor: Welcome, or an end of file for strangers
//   then, in both directions, frames: FrameHeader | CallHeader (if flagged) | payload
//
// Numbers are in the byte order of the machine; a peer with the other order fails at the magic.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "transport/call.h"

namespace pycoll::tcp {

constexpr uint64_t kHelloMagic = 0x315063744C4C4F43ull;
constexpr uint32_t kFrameMagic = 0x31504350u;
// The longest payload of a frame that is no message.
constexpr uint32_t kControlBytes = 4096;

using Id = std::array<char, 32>;  // random_name()

struct Hello {
  uint64_t magic = kHelloMagic;
  Id secret{};   // of the acceptor, as its description gives it to the ranks of its groups
  Id process{};  // of the dialer
  Id link{};     // names the link whose connections these are
  uint32_t connections = 1;  // that it has
  uint32_t heartbeat_ms = 10'000;
};
static_assert(sizeof(Hello) == 112 && std::is_trivially_copyable_v<Hello>);

struct Welcome {
  uint64_t magic = kHelloMagic;
  Id process{};  // of the acceptor: another process may listen where a dead one did
};
static_assert(sizeof(Welcome) == 40 && std::is_trivially_copyable_v<Welcome>);

enum class FrameKind : uint8_t {
  open,     // asks for a session; payload: OpenBody as text
  opened,   // the answer
  data,     // a message of a FIFO
  credit,   // slots of a FIFO given back
  ready,    // index: a stage of connecting
  call,     // the sender's current call, or one that is carried out elsewhere
  inquire,  // the sender's; asks for the receiver's. index: its number, the lowest bits
  abort,    // payload: why
  leave,    // on every connection of the link, behind all data
  kCount
};

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::data;
  uint8_t channel = 0;
  uint8_t wire = 0;
  uint8_t has_call = 0;  // a CallHeader follows
  uint32_t session = 0;  // the receiver's number of it
  uint32_t index = 0;    // data: which message of its FIFO
  uint32_t bytes = 0;    // of the payload
  uint32_t fingerprint = 0;
  uint32_t released =
      0;  // data, credit: messages of this channel, the other way, given back so far
  uint32_t reserved = 0;
};
static_assert(sizeof(FrameHeader) == 32 && std::is_trivially_copyable_v<FrameHeader>);

// A message's own memory, where what the kernel does not take at once waits for it.
struct SendSlot {
  std::byte* data = nullptr;
  std::atomic<bool>* busy = nullptr;  // cleared when the payload is with the kernel
};

// What one group's traffic between two ranks is called, from one side.
struct SessionKey {
  std::string group;
  int local = 0;
  int remote = 0;
  auto operator<=>(const SessionKey&) const = default;
};

// Of `open` and `opened`: who the sender is, whom it wants, and its number of the session.
struct OpenBody {
  SessionKey key;  // as the sender sees it
  uint32_t number = 0;

  std::string to_text() const;
  // False when it is none.
  static bool parse(const std::string& text, OpenBody& body);
};

}  // namespace pycoll::tcp
