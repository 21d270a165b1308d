#include "transport/shm/packet.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <sstream>

#include "core/error.h"

namespace pycoll::shm {
namespace {

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t length = 0;
};

// A leading NUL puts the name into the abstract namespace.
AbstractAddress abstract_address(const std::string& name) {
  AbstractAddress result;
  result.address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(result.address.sun_path) - 1);
  std::memcpy(result.address.sun_path + 1, name.data(), length);
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return result;
}

UniqueFd open_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) fail(ErrorKind::system, errno_text("socket(AF_UNIX)"));
  return fd;
}

// The ancillary data of one packet with its descriptors.
constexpr size_t kMostDescriptors = 2;
union RightsBuffer {
  cmsghdr header;
  std::byte bytes[CMSG_SPACE(kMostDescriptors * sizeof(int))];
};
// Not CMSG_SPACE: its padding could have room for another descriptor, which nobody would close.
constexpr size_t control_bytes(size_t descriptors) {
  return CMSG_LEN(descriptors * sizeof(int));
}

// How many descriptors a packet has brought.
size_t descriptors_in(const cmsghdr* control) {
  if (control == nullptr || control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS ||
      control->cmsg_len < control_bytes(1)) {
    return 0;
  }
  return std::min(kMostDescriptors, (control->cmsg_len - control_bytes(0)) / sizeof(int));
}

}  // namespace

std::string encode(const Packet& packet) {
  std::string bytes = concat(static_cast<char>(packet.kind), " ", packet.key);
  if (packet.kind == Kind::hello) bytes += " " + packet.id;
  if (packet.kind == Kind::open) bytes += concat(" ", packet.from, " ", packet.to);
  if (packet.kind == Kind::abort) bytes += " " + packet.text;
  return bytes.substr(0, kPacketBytes);
}

std::optional<Packet> decode(std::string_view bytes) {
  std::istringstream in{std::string(bytes)};
  Packet packet;
  char kind = 0;
  if (!(in.get(kind) >> packet.key)) return std::nullopt;
  packet.kind = static_cast<Kind>(kind);
  switch (packet.kind) {
    case Kind::hello:
      in >> packet.id;
      break;
    case Kind::open:
      in >> packet.from >> packet.to;
      break;
    case Kind::leave:
      break;
    case Kind::abort:
      in.ignore(1);
      std::getline(in, packet.text, '\0');
      in.clear();
      break;
    default:
      return std::nullopt;
  }
  if (!in) return std::nullopt;
  return packet;
}

Sent send_packet(int socket, const std::string& bytes, const Attachments* attachments) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  RightsBuffer rights{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (attachments != nullptr) {
    const int descriptors[kMostDescriptors] = {attachments->segment.get(),
                                               attachments->arena.get()};
    const size_t count = attachments->arena ? 2 : 1;
    message.msg_control = &rights;
    message.msg_controllen = control_bytes(count);
    cmsghdr* control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = control_bytes(count);
    std::memcpy(CMSG_DATA(control), descriptors, count * sizeof(int));
  }
  while (::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    // ETOOMANYREFS: too many descriptors are in flight already, until the peer reads.
    const bool full = errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS;
    return full ? Sent::later : Sent::never;
  }
  return Sent::yes;
}

Incoming receive_packet(int socket, std::span<char, kPacketBytes> buffer) {
  iovec part{buffer.data(), buffer.size()};
  RightsBuffer rights{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &rights;
  message.msg_controllen = control_bytes(kMostDescriptors);
  Incoming incoming;
  ssize_t bytes;
  while ((bytes = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT)) < 0) {
    // ECONNRESET: the peer closed before it had read all of ours. It is told once; what the peer
    // sent before is still there, and the next call gives it.
    if (errno == EINTR || errno == ECONNRESET) continue;
    incoming.what = errno == EAGAIN ? Incoming::What::nothing : Incoming::What::closed;
    return incoming;
  }
  const cmsghdr* control = CMSG_FIRSTHDR(&message);
  int descriptors[kMostDescriptors] = {-1, -1};
  if (const size_t count = descriptors_in(control); count > 0) {
    std::memcpy(descriptors, CMSG_DATA(control), count * sizeof(int));
  }
  incoming.attachments = {UniqueFd(descriptors[0]), UniqueFd(descriptors[1])};
  incoming.attachment_lost = !incoming.attachments.segment && (message.msg_flags & MSG_CTRUNC) != 0;
  // An empty packet and the end look the same; nobody of ours sends an empty one.
  incoming.what = bytes == 0 ? Incoming::What::closed : Incoming::What::packet;
  incoming.bytes = {buffer.data(), static_cast<size_t>(bytes)};
  return incoming;
}

UniqueFd listen_at(const std::string& name, int backlog) {
  UniqueFd fd = open_socket();
  const AbstractAddress at = abstract_address(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&at.address), at.length) != 0) {
    fail(ErrorKind::system, errno_text("bind of an abstract unix socket"));
  }
  if (::listen(fd.get(), backlog) != 0) fail(ErrorKind::system, errno_text("listen"));
  return fd;
}

UniqueFd dial(const std::string& name) {
  UniqueFd fd = open_socket();
  const AbstractAddress at = abstract_address(name);
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at.address), at.length) != 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return UniqueFd();
    fail(ErrorKind::peer_failed, errno_text("connect to its control socket"));
  }
  return fd;
}

UniqueFd process_behind(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  // The kernel's word for who connected; a pid that the peer claims could be wrong in its
  // namespace.
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return UniqueFd();
  if (credentials.pid <= 0 || credentials.pid == ::getpid()) return UniqueFd();
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)));
}

std::string owner_of(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return "an unknown process";
  }
  return concat("process ", credentials.pid, " of user ", credentials.uid);
}

bool has_exited(const UniqueFd& process) {
  pollfd asked{process.get(), POLLIN, 0};
  return ::poll(&asked, 1, 0) == 1 && (asked.revents & POLLIN) != 0;
}

}  // namespace pycoll::shm
