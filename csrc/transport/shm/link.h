// The control connection to one local peer: a unix socket that carries segment descriptors while
// connecting, and afterwards only goodbyes and aborts; and a pidfd that tells when the process is
// gone.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>

#include "core/clock.h"
#include "core/fd.h"

namespace pycoll::shm {

// The first packet on a connection, with the sender's segment attached (SCM_RIGHTS).
struct Hello {
  std::string job_key;
  int rank = -1;
};

// Later packets: one byte of kind, then text.
enum class Note : char { ready = 'R', leave = 'L', abort = 'A' };

// How long to wait, and what to call in between (it may throw).
struct Patience {
  Deadline deadline;
  std::function<void()> interrupt;
};

class Link {
 public:
  Link() = default;
  explicit Link(UniqueFd socket) : socket_(std::move(socket)) {}

  void send_hello(const Hello& hello, const UniqueFd& segment) const;
  // Nothing when the peer closed the connection or sent something else. Throws on deadline.
  std::optional<Hello> receive_hello(const Patience& patience, UniqueFd& segment) const;

  // Never blocks; false when the peer cannot be told (gone, or its socket is full).
  bool send_note(Note note, const std::string& text) const;
  enum class Received { nothing, note, closed };
  Received receive_note(Note& note, std::string& text) const;
  // Waits for a note. Throws on deadline.
  Received wait_for_note(const Patience& patience, Note& note, std::string& text) const;

  // Opens a pidfd for the process at the other end. Without one (old kernel, other pid namespace)
  // the peer's death is seen as end-of-file on the socket, which a forked child of the peer can
  // delay.
  void watch_process();

  int socket() const { return socket_.get(); }
  int pidfd() const { return pidfd_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }

 private:
  UniqueFd socket_;
  UniqueFd pidfd_;
};

// A listening socket in the abstract namespace, with a random name.
class Listener {
 public:
  explicit Listener(int backlog);
  const std::string& address() const { return address_; }
  // Nothing when no connection came within `at_most`.
  std::optional<Link> accept(Nanoseconds at_most) const;

 private:
  std::string address_;
  UniqueFd socket_;
};

// Throws Error(peer_failed) when nobody listens there any more.
Link connect_to(const std::string& address);

}  // namespace pycoll::shm
