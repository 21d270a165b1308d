#include "transport/tcp/dial.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/random.h"

namespace pycoll::tcp {
namespace {

constexpr Nanoseconds kStagger = std::chrono::milliseconds(250);
constexpr Nanoseconds kConnectPatience = std::chrono::seconds(10);
constexpr Nanoseconds kWelcomePatience = std::chrono::seconds(5);
constexpr Nanoseconds kFirstPause = std::chrono::milliseconds(5);
constexpr Nanoseconds kLongestPause = std::chrono::milliseconds(500);
// A proxy that is still starting may refuse for a while.
constexpr Nanoseconds kRefusedPatience = std::chrono::seconds(5);

// Packets leave through that interface, whatever the routes say. Best effort: it needs a kernel
// that lets everyone do so, and a single name.
void leave_through(int socket, const std::string& interface) {
  ::setsockopt(socket, SOL_SOCKET, SO_BINDTODEVICE, interface.c_str(),
               static_cast<socklen_t>(interface.size()));
}

void set_number(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof(value));
}

}  // namespace

void prepare_connection(int socket, Nanoseconds heartbeat, int buffer) {
  if (buffer > 0) set_number(socket, SOL_SOCKET, SO_SNDBUF, buffer);
  set_number(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // Idle time, then probes: their sum is the heartbeat, in whole seconds. An idle connection is
  // watched by these, one with data on its way by Connection::is_lost().
  const int seconds = std::max(1, static_cast<int>(to_seconds(heartbeat)));
  const int interval = std::max(1, seconds / 5);
  const int probes = std::clamp((seconds - 1) / interval, 1, 3);
  set_number(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_number(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds - interval * probes));
  set_number(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set_number(socket, IPPROTO_TCP, TCP_KEEPCNT, probes);
#ifdef TCP_RTO_MAX_MS
  // Retransmissions and probes of a full window come often enough to tell within the heartbeat.
  set_number(socket, IPPROTO_TCP, TCP_RTO_MAX_MS, std::max(1000, seconds * 1000 / 3));
#endif
}

Dial::Dial(const Description& mine, const Description& theirs, std::shared_ptr<Descriptors> table,
           int buffer)
    : mine_(mine),
      theirs_(theirs),
      table_(std::move(table)),
      buffer_(buffer),
      candidates_(candidates(mine, theirs)),
      outcomes_(candidates_.size(), "not tried yet"),
      refused_(candidates_.size(), false) {}

void Dial::note(size_t candidate, const std::string& what, bool refused) {
  outcomes_[candidate] = what;
  refused_[candidate] = refused;
  const bool all = std::find(refused_.begin(), refused_.end(), false) == refused_.end();
  if (!all) refused_since_.reset();
  if (all && !refused_since_) refused_since_ = Clock::now();
}

bool Dial::is_refused(Clock::time_point now) const {
  return refused_since_ && now - *refused_since_ > kRefusedPatience;
}

void Dial::add_to(std::vector<pollfd>& entries) const {
  for (const Attempt& each : attempts_) {
    const short events = each.connected ? POLLIN : POLLOUT;
    entries.push_back({each.socket.get(), events, 0});
  }
}

bool Dial::begin(Attempt& attempt, Clock::time_point now) {
  const Candidate& to = candidates_[attempt.candidate];
  attempt.socket = Socket(table_, [&] {
    return ::socket(to.address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  });
  if (!attempt.socket) {
    // Peers would wait for a rank that has no descriptor for them.
    const bool starved = errno == EMFILE || errno == ENFILE;
    const std::string reason = errno_text("socket");
    if (starved) fail(ErrorKind::system, "connecting to ", to_string(to), ": ", reason);
    note(attempt.candidate, reason);
    return false;
  }
  if (!to.through.empty()) leave_through(attempt.socket.get(), to.through);
  attempt.until = now + kConnectPatience;
  // A refusal stands until something else is known.
  if (!refused_[attempt.candidate]) note(attempt.candidate, "no answer");
  if (::connect(attempt.socket.get(), to.address.get(), to.address.length()) == 0 ||
      errno == EINPROGRESS) {
    return true;
  }
  note(attempt.candidate, errno_text("connect"), errno == ECONNREFUSED);
  return false;
}

void Dial::launch(Clock::time_point now) {
  if (now < launch_at_) return;
  if (winner_) {
    // All the connections that are missing, at once.
    while (done_.size() + attempts_.size() < theirs_.connections) {
      Attempt attempt;
      attempt.candidate = *winner_;
      attempt.link = link_;
      if (!begin(attempt, now)) break;
      attempts_.push_back(std::move(attempt));
    }
    launch_at_ = now + kLongestPause;
    return;
  }
  if (next_ == candidates_.size()) {
    next_ = 0;
    ++failed_rounds_;
  }
  const size_t candidate = next_++;
  const bool is_tried = std::any_of(attempts_.begin(), attempts_.end(), [&](const Attempt& each) {
    return each.candidate == candidate;
  });
  Attempt attempt;
  attempt.candidate = candidate;
  attempt.link = to_id(random_name());
  const bool begun = !is_tried && begin(attempt, now);
  if (begun) attempts_.push_back(std::move(attempt));
  launch_at_ = begun ? now + kStagger : now;
  if (next_ == candidates_.size()) {
    // Before the next round.
    const Nanoseconds pause =
        std::min(kLongestPause, kFirstPause * (1 << std::min(failed_rounds_, 10)));
    launch_at_ = now + (attempts_.empty() ? pause : std::max(pause, kStagger));
  }
}

bool Dial::send_hello(Attempt& attempt) {
  Hello hello;
  hello.secret = theirs_.secret;
  hello.process = mine_.process;
  hello.link = attempt.link;
  hello.connections = theirs_.connections;
  hello.heartbeat_ms = theirs_.heartbeat_ms;
  // The send buffer of a fresh connection takes that much at once.
  return ::send(attempt.socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL) == sizeof(hello);
}

Dial::Outcome Dial::receive_welcome(Attempt& attempt) {
  auto* at = reinterpret_cast<char*>(&attempt.welcome) + attempt.received;
  const ssize_t got = ::recv(attempt.socket.get(), at, sizeof(Welcome) - attempt.received, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Outcome::waits;
  if (got <= 0) {
    note(attempt.candidate,
         got == 0 ? "the connection was closed by who listens there" : errno_text("recv"));
    return Outcome::failed;
  }
  attempt.received += static_cast<size_t>(got);
  if (attempt.received < sizeof(Welcome)) return Outcome::waits;
  if (attempt.welcome.magic == kHelloMagic && attempt.welcome.process == theirs_.process) {
    return Outcome::welcomed;
  }
  note(attempt.candidate, "another process listens there");
  return Outcome::failed;
}

Dial::Outcome Dial::step(Attempt& attempt, Clock::time_point now) {
  if (!attempt.connected) {
    pollfd entry{attempt.socket.get(), POLLOUT, 0};
    if (::poll(&entry, 1, 0) == 0) {
      if (now < attempt.until) return Outcome::waits;
      note(attempt.candidate, "no answer");
      return Outcome::failed;
    }
    int error = 0;
    socklen_t length = sizeof(error);
    ::getsockopt(attempt.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      note(attempt.candidate, std::strerror(error), error == ECONNREFUSED);
      return Outcome::failed;
    }
    attempt.connected = true;
    attempt.until = now + kWelcomePatience;
    prepare_connection(attempt.socket.get(), std::chrono::milliseconds(theirs_.heartbeat_ms),
                       buffer_);
    note(attempt.candidate, "connected, but no welcome came");
    if (!send_hello(attempt)) {
      note(attempt.candidate, errno_text("send"));
      return Outcome::failed;
    }
  }
  const Outcome outcome = receive_welcome(attempt);
  return outcome == Outcome::waits && now >= attempt.until ? Outcome::failed : outcome;
}

bool Dial::advance(Clock::time_point now) {
  launch(now);
  for (size_t i = 0; i < attempts_.size();) {
    Attempt& attempt = attempts_[i];
    const Outcome outcome = step(attempt, now);
    if (outcome == Outcome::waits) {
      ++i;
      continue;
    }
    if (outcome == Outcome::welcomed && !winner_) {
      winner_ = attempt.candidate;
      link_ = attempt.link;
      done_.push_back(std::move(attempt.socket));
      attempts_.clear();  // the addresses that were slower
      launch_at_ = now;
      launch(now);
      i = 0;
      continue;
    }
    if (outcome == Outcome::welcomed) done_.push_back(std::move(attempt.socket));
    attempts_.erase(attempts_.begin() + static_cast<std::ptrdiff_t>(i));
    if (outcome == Outcome::failed && winner_) {
      ++failed_rounds_;
      launch_at_ = now + std::min(kLongestPause, kFirstPause * (1 << std::min(failed_rounds_, 10)));
    } else if (outcome == Outcome::failed && attempts_.empty() && next_ < candidates_.size()) {
      launch_at_ = now;  // nobody else is being waited for
    } else if (outcome == Outcome::failed && attempts_.empty()) {
      const auto pause = std::min(kLongestPause, kFirstPause * (1 << std::min(failed_rounds_, 10)));
      launch_at_ = std::min(launch_at_, now + pause);
    }
  }
  due_ = launch_at_;
  for (const Attempt& each : attempts_) due_ = std::min(due_, each.until);
  return winner_ && done_.size() == theirs_.connections;
}

std::vector<Socket> Dial::take() {
  return std::move(done_);
}

std::string Dial::report() const {
  std::string text;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    text += concat(i == 0 ? "" : "; ", to_string(candidates_[i]), ": ", outcomes_[i]);
  }
  return text;
}

}  // namespace pycoll::tcp
