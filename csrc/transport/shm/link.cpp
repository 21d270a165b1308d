#include "transport/shm/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "core/error.h"
#include "core/random.h"

namespace pycoll::shm {
namespace {

constexpr size_t kPacketBytes = 4096;
constexpr const char* kGreeting = "pycoll-shm-1 ";

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t length = 0;
};

// A leading NUL puts the name into the abstract namespace: no file, gone with the last descriptor.
AbstractAddress abstract_address(const std::string& name) {
  AbstractAddress result;
  result.address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(result.address.sun_path) - 1);
  std::memcpy(result.address.sun_path + 1, name.data(), length);
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return result;
}

UniqueFd open_socket(int flags) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!fd) fail(ErrorKind::system, errno_text("socket(AF_UNIX)"));
  return fd;
}

// In slices, so that signals are served. False when the deadline passed.
bool wait_readable(int fd, const Patience& patience) {
  for (;;) {
    if (patience.interrupt) patience.interrupt();
    pollfd entry{fd, POLLIN, 0};
    const int ready = ::poll(&entry, 1, patience.deadline.remaining_ms(100));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail(ErrorKind::system, errno_text("poll"));
    if (patience.deadline.passed()) return false;
  }
}

// The ancillary data of one packet that carries at most one descriptor.
union RightsBuffer {
  cmsghdr header;
  std::byte bytes[CMSG_SPACE(sizeof(int))];
};

UniqueFd take_descriptor(msghdr& message) {
  UniqueFd taken;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(c), sizeof(fd));
    taken = UniqueFd(fd);
  }
  return taken;
}

std::optional<Hello> parse_hello(const std::string& text) {
  if (text.rfind(kGreeting, 0) != 0) return std::nullopt;
  const std::string rest = text.substr(std::strlen(kGreeting));
  const size_t space = rest.find(' ');
  if (space == std::string::npos) return std::nullopt;
  Hello hello;
  hello.job_key = rest.substr(0, space);
  try {
    hello.rank = std::stoi(rest.substr(space + 1));
  } catch (const std::exception&) {
    return std::nullopt;  // a stranger's packet: not ours to complain about
  }
  return hello;
}

}  // namespace

void Link::send_hello(const Hello& hello, const UniqueFd& segment) const {
  std::string text = concat(kGreeting, hello.job_key, " ", hello.rank);
  iovec part{text.data(), text.size()};
  RightsBuffer rights{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &rights;
  message.msg_controllen = sizeof(rights);
  cmsghdr* control = CMSG_FIRSTHDR(&message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = segment.get();
  std::memcpy(CMSG_DATA(control), &fd, sizeof(fd));
  if (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) {
    fail(ErrorKind::peer_failed, errno_text("sending the first packet to a peer"));
  }
}

std::optional<Hello> Link::receive_hello(const Patience& patience, UniqueFd& segment) const {
  if (!wait_readable(socket_.get(), patience)) fail(ErrorKind::timed_out, "no answer");
  std::array<char, 512> buffer{};
  iovec part{buffer.data(), buffer.size()};
  RightsBuffer rights{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &rights;
  message.msg_controllen = sizeof(rights);
  const ssize_t bytes = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes <= 0) return std::nullopt;
  segment = take_descriptor(message);
  return parse_hello(std::string(buffer.data(), static_cast<size_t>(bytes)));
}

bool Link::send_note(Note note, const std::string& text) const {
  std::string packet(1, static_cast<char>(note));
  packet += text.substr(0, kPacketBytes - 1);
  return ::send(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0;
}

Link::Received Link::receive_note(Note& note, std::string& text) const {
  std::array<char, kPacketBytes> buffer{};
  const ssize_t bytes = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return Received::nothing;
  if (bytes <= 0) return Received::closed;
  note = static_cast<Note>(buffer[0]);
  text.assign(buffer.data() + 1, static_cast<size_t>(bytes - 1));
  return Received::note;
}

Link::Received Link::wait_for_note(const Patience& patience, Note& note, std::string& text) const {
  Received received = Received::nothing;
  while (received == Received::nothing) {
    if (!wait_readable(socket_.get(), patience)) fail(ErrorKind::timed_out, "no answer");
    received = receive_note(note, text);
  }
  return received;
}

void Link::watch_process() {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  // The kernel's word for who connected; a pid that the peer claims could be wrong in its
  // namespace.
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return;
  if (credentials.pid <= 0 || credentials.pid == ::getpid()) return;
  pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)));
}

Listener::Listener(int backlog)
    : address_("pycoll-" + random_name()), socket_(open_socket(SOCK_NONBLOCK)) {
  const AbstractAddress at = abstract_address(address_);
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&at.address), at.length) != 0) {
    fail(ErrorKind::system, errno_text("bind of an abstract unix socket"));
  }
  if (::listen(socket_.get(), backlog) != 0) fail(ErrorKind::system, errno_text("listen"));
}

std::optional<Link> Listener::accept(Nanoseconds at_most) const {
  if (!wait_readable(socket_.get(), {Deadline::after(at_most), nullptr})) return std::nullopt;
  UniqueFd fd(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!fd) return std::nullopt;
  return Link(std::move(fd));
}

Link connect_to(const std::string& address) {
  UniqueFd fd = open_socket(0);
  const AbstractAddress at = abstract_address(address);
  int status;
  do {
    status = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at.address), at.length);
  } while (status != 0 && errno == EINTR);
  if (status != 0) fail(ErrorKind::peer_failed, errno_text("connect to its control socket"));
  return Link(std::move(fd));
}

}  // namespace pycoll::shm
