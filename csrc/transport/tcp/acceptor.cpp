#include "transport/tcp/acceptor.h"

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "core/error.h"
#include "transport/tcp/address.h"
#include "transport/tcp/dial.h"

namespace pycoll::tcp {
namespace {

constexpr size_t kMostUnfinished = 256;
constexpr size_t kMostForming = 1024;
constexpr uint32_t kMostConnections = 64;  // of a link
constexpr Nanoseconds kHelloPatience = std::chrono::seconds(5);
constexpr Nanoseconds kFormingPatience = std::chrono::seconds(30);
constexpr Nanoseconds kPause = std::chrono::milliseconds(100);
constexpr int kBacklog = 4096;

// Listens on all addresses, of both families where there are two.
Socket listen_on_all(const std::shared_ptr<Descriptors>& table, uint16_t& port) {
  for (const int family : {AF_INET6, AF_INET}) {
    Socket socket(table,
                  [&] { return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
    if (!socket) continue;
    const int off = 0;
    if (family == AF_INET6) {
      ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    }
    // All zeros are the wildcard address of both families.
    sockaddr_storage any{};
    any.ss_family = static_cast<sa_family_t>(family);
    socklen_t length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&any), length) != 0 ||
        ::listen(socket.get(), kBacklog) != 0 ||
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&any), &length) != 0) {
      continue;
    }
    port = ntohs(reinterpret_cast<const sockaddr_in*>(&any)->sin_port);
    return socket;
  }
  fail(ErrorKind::system, errno_text("listening on a TCP port"));
}

// In a time that does not tell how much of it was right.
bool equal(const Id& a, const Id& b) {
  int difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace

// A connection that has sent less than a Hello.
class Acceptor::Handshake final : public IoHandler {
 public:
  Handshake(Acceptor& acceptor, Socket socket) : acceptor_(acceptor), socket_(std::move(socket)) {}
  ~Handshake() override { stop(); }

  void start(std::weak_ptr<IoHandler> self) {
    registration_ = acceptor_.io_.add(socket_.get(), EPOLLIN, std::move(self));
  }
  void on_events(uint32_t /*events*/) override {
    auto* at = reinterpret_cast<char*>(&hello_) + received_;
    const ssize_t got = ::recv(socket_.get(), at, sizeof(hello_) - received_, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0) received_ += static_cast<size_t>(got);
    const bool begins_well = received_ < sizeof(hello_.magic) || hello_.magic == kHelloMagic;
    if (got > 0 && begins_well && received_ < sizeof(hello_)) return;
    // Who goes again without a word, as a health check does, is no news.
    bool known = got <= 0;
    if (got > 0 && begins_well) {
      stop();
      known = acceptor_.admit(hello_, socket_);
    }
    if (!known) acceptor_.report_stranger(socket_.get());
    acceptor_.drop(this);
  }
  Clock::time_point until() const { return until_; }

 private:
  void stop() {
    if (registration_ != 0) acceptor_.io_.remove(registration_, socket_.get());
    registration_ = 0;
  }

  Acceptor& acceptor_;
  Socket socket_;
  Hello hello_;
  size_t received_ = 0;
  uint64_t registration_ = 0;
  const Clock::time_point until_ = Clock::now() + kHelloPatience;
};

Acceptor::Acceptor(const AcceptorIdentity& identity, std::shared_ptr<Descriptors> table,
                   IoThread& io, std::function<void(Accepted)> on_link)
    : identity_(identity),
      table_(std::move(table)),
      io_(io),
      on_link_(std::move(on_link)),
      socket_(listen_on_all(table_, port_)) {}

void Acceptor::start() {
  registration_ = io_.add(socket_.get(), EPOLLIN, weak_from_this());
}

void Acceptor::on_events(uint32_t /*events*/) {
  for (int i = 0; i < 64; ++i) {
    int error = 0;
    Socket socket(table_, [&] {
      const int fd = ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      error = errno;
      return fd;
    });
    if (!socket) {
      if (error == EINTR || error == ECONNABORTED) continue;
      if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        errno = error;
        report_starvation(errno_text("accept of a peer's connection"));
        // The oldest stranger gives way; and no busy loop until there are descriptors again.
        if (!unfinished_.empty()) unfinished_.pop_front();
        pausing_ = true;
        io_.modify(registration_, socket_.get(), 0);
        io_.tick_within(kPause);
      }
      return;
    }
    take(std::move(socket));
  }
}

// In the IO thread nobody could catch what is thrown: whoever connects is told by the end of his
// connection, the groups of this process by starvation().
void Acceptor::take(Socket socket) {
  if (unfinished_.size() >= kMostUnfinished) unfinished_.pop_front();
  const auto handshake = std::make_shared<Handshake>(*this, std::move(socket));
  try {
    handshake->start(handshake);
  } catch (const Error& error) {
    return report_starvation(error.what());
  }
  unfinished_.push_back(handshake);
  io_.tick_within(kHelloPatience);
}

void Acceptor::report_starvation(const std::string& reason) {
  const std::lock_guard lock(starvation_mutex_);
  ++starvation_.times;
  starvation_.reason = reason;
}

Starvation Acceptor::starvation() const {
  const std::lock_guard lock(starvation_mutex_);
  return starvation_;
}

void Acceptor::report_stranger(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  const bool named = ::getpeername(socket, address, &length) == 0;
  strange_.say(concat("dropped a connection to TCP port ", port_, " from ",
                      named ? Address(address, length).to_string() : "a host that has gone again",
                      ", which did not show this process's key: a process of another job or of an "
                      "earlier run, or no rank at all"));
}

void Acceptor::drop(const Handshake* handshake) {
  const auto found = std::find_if(unfinished_.begin(), unfinished_.end(),
                                  [&](const auto& each) { return each.get() == handshake; });
  if (found != unfinished_.end()) unfinished_.erase(found);
}

bool Acceptor::admit(const Hello& hello, Socket& socket) {
  if (!equal(hello.secret, identity_.secret)) return false;
  if (hello.connections == 0 || hello.connections > kMostConnections) return false;
  const FormingKey key(hello.process, hello.link);
  Forming& forming = forming_[key];
  forming.hello = hello;
  forming.until = Clock::now() + kFormingPatience;
  const Nanoseconds heartbeat =
      std::chrono::milliseconds(std::clamp<uint32_t>(hello.heartbeat_ms, 100, 86'400'000));
  prepare_connection(socket.get(), heartbeat, identity_.buffer);
  const int fd = socket.get();
  forming.sockets.push_back(std::move(socket));
  const bool complete = forming.sockets.size() == hello.connections;
  Accepted link;
  if (complete) {
    link = {hello, std::move(forming.sockets)};
    forming_.erase(key);
  } else if (forming_.size() > kMostForming) {
    forming_.erase(std::min_element(forming_.begin(), forming_.end(), [](auto& a, auto& b) {
      return a.second.until < b.second.until;
    }));
  }
  Welcome welcome;
  welcome.process = identity_.process;
  // The send buffer of a fresh connection takes that much at once. A dialer that went away is found
  // out by whoever reads the connection.
  ::send(fd, &welcome, sizeof(welcome), MSG_NOSIGNAL | MSG_DONTWAIT);
  io_.tick_within(kFormingPatience);
  try {
    if (complete) on_link_(std::move(link));
  } catch (const Error& error) {
    report_starvation(error.what());
  }
  return true;
}

Nanoseconds Acceptor::tick(Clock::time_point now) {
  if (pausing_) {
    pausing_ = false;
    io_.modify(registration_, socket_.get(), EPOLLIN);
  }
  while (!unfinished_.empty() && unfinished_.front()->until() <= now) unfinished_.pop_front();
  std::erase_if(forming_, [&](const auto& each) { return each.second.until <= now; });
  Nanoseconds next = std::chrono::hours(1);
  if (!unfinished_.empty()) next = unfinished_.front()->until() - now;
  if (!forming_.empty()) next = std::min<Nanoseconds>(next, std::chrono::seconds(1));
  return std::max<Nanoseconds>(next, std::chrono::milliseconds(1));
}

}  // namespace pycoll::tcp
