// What travels between two processes of a host: packets on a unix socket (SOCK_SEQPACKET: a packet
// comes whole or not at all), some with descriptors attached (SCM_RIGHTS).
//
// Nothing here waits: a socket that is not ready is a normal answer.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/fd.h"

namespace pycoll::shm {

constexpr size_t kPacketBytes = 4096;

enum class Kind : char {
  hello = 'H',  // the first one: who dials, and that it knows the key of whom it dials
  open = 'O',   // a rank of a group is there; its segment is attached, and its arena if it has one
  leave = 'L',  // it leaves in good order
  abort = 'A',  // it gives the group up
};

struct Packet {
  Kind kind = Kind::hello;
  std::string key;   // hello: of the process that is dialled; else of the group
  std::string id;    // hello: of the dialling process
  int from = -1;     // open: the sender's rank
  int to = -1;       // open: the receiver's
  std::string text;  // abort: why
};

// At most kPacketBytes; a long reason is cut.
std::string encode(const Packet& packet);
// Nothing when it is none: whatever a stranger sends.
std::optional<Packet> decode(std::string_view bytes);

// The memory of a rank: of a group, and what it shares with all its peers (or none).
struct Attachments {
  UniqueFd segment;
  UniqueFd arena;
};

enum class Sent { yes, later, never };
Sent send_packet(int socket, const std::string& bytes, const Attachments* attachments);

struct Incoming {
  enum class What { packet, nothing, closed } what = What::nothing;
  std::string_view bytes;  // in the caller's buffer
  Attachments attachments;
  bool attachment_lost = false;  // this process may open no more descriptors
};
Incoming receive_packet(int socket, std::span<char, kPacketBytes> buffer);

// A listening socket in the abstract namespace: no file, gone with its last descriptor.
UniqueFd listen_at(const std::string& name, int backlog);
// Empty when the listener's queue is full at the moment. Throws Error(peer_failed) when nobody
// listens there.
UniqueFd dial(const std::string& name);

// A pidfd of the process at the other end; empty where there is none (an old kernel, another pid
// namespace, a seccomp filter, this process itself).
UniqueFd process_behind(int socket);
// The process and user at the other end, in words.
std::string owner_of(int socket);
// By its pidfd: all its threads have ended. False when that cannot be told.
bool has_exited(const UniqueFd& process);

}  // namespace pycoll::shm
