#include "transport/shm/endpoints.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "core/error.h"
#include "core/random.h"
#include "core/signals.h"
#include "transport/shm/port.h"

namespace pycoll::shm {
namespace {

constexpr int kBacklog = 4096;
// Bounds of what others can make this process keep.
constexpr size_t kMostStrangers = 32;   // connections that have not shown the key
constexpr size_t kMostWaiting = 256;    // groups opened ahead of this process, a connection
constexpr size_t kMostOutgoing = 4096;  // packets to a peer that does not read
constexpr size_t kMostGivenUp = 64;
constexpr Nanoseconds kShowKeyWithin = std::chrono::seconds(5);
constexpr Nanoseconds kPauseWithoutDescriptors = std::chrono::milliseconds(50);
constexpr int kPacketsAtOnce = 64;  // then it is another connection's turn

// What an epoll entry is about: one of these, or a connection's token * 2 (+ 1: its pidfd).
constexpr uint64_t kStopEntry = 0;
constexpr uint64_t kListenerEntry = 1;

uint64_t socket_entry(const Endpoint& endpoint) {
  return endpoint.token * 2;
}

}  // namespace

Endpoints::Endpoints()
    : address_{random_name(), random_name(), "pycoll-" + random_name()},
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!epoll_ || !stop_) fail(ErrorKind::system, errno_text("epoll_create1 or eventfd"));
  listener_ = listen_at(address_.socket, kBacklog);
  watch(stop_.get(), kStopEntry, EPOLLIN, EPOLL_CTL_ADD);
  watch(listener_.get(), kListenerEntry, EPOLLIN, EPOLL_CTL_ADD);
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
  ::pthread_setname_np(thread_.native_handle(), "pycoll-shm");
}

Endpoints::~Endpoints() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
  }
  thread_.join();
  while (!endpoints_.empty()) erase(*endpoints_.begin()->second);
}

void Endpoints::after_fork_child() {
  listener_.reset();
  epoll_.reset();
  stop_.reset();
  for (auto& [token, endpoint] : endpoints_) {
    // close() alone: shutdown() would end the parent's connection.
    endpoint->socket.reset();
    if (endpoint->pidfd) endpoint->pidfd->reset();
  }
  mutex_.unlock();
}

void Endpoints::watch(int fd, uint64_t entry, uint32_t events, int how) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = entry;
  if (::epoll_ctl(epoll_.get(), how, fd, &event) != 0) {
    fail(ErrorKind::system, errno_text("epoll_ctl"));
  }
}

// ---- Groups ----

void Endpoints::join(Port& port) {
  if (!ports_.emplace(port.key(), &port).second) {
    fail(ErrorKind::invalid_argument, "two ranks of one group use the same shm connector");
  }
  for (auto& [token, endpoint] : endpoints_) {
    auto found = endpoint->waiting.extract(port.key());
    if (found) port.take_open(*endpoint, found.mapped().open, std::move(found.mapped().memory));
  }
}

void Endpoints::part(Port& port) {
  ports_.erase(port.key());
  std::vector<Endpoint*> used;
  for (auto& [token, endpoint] : endpoints_) {
    if (endpoint->groups.erase(port.key()) != 0) used.push_back(endpoint.get());
  }
  for (Endpoint* endpoint : used) drop_if_idle(*endpoint);
}

Endpoints::Reached Endpoints::reach(const Address& address) {
  const auto known = dialled_.find(address.id);
  if (known != dialled_.end()) return {known->second, true};
  UniqueFd socket = dial(address.socket);
  if (!socket) return {};
  Endpoint& endpoint = add(std::move(socket));
  endpoint.peer = address.id;
  dialled_[address.id] = &endpoint;
  watch_process(endpoint);
  Packet hello;
  hello.key = address.key;
  hello.id = address_.id;
  send(endpoint, hello, nullptr);
  return {&endpoint, false};
}

void Endpoints::send(Endpoint& endpoint, const Packet& packet,
                     std::shared_ptr<const Attachments> memory) {
  if (endpoint.outbox.size() >= kMostOutgoing) return;  // its process has been stopped, it seems
  endpoint.outbox.push_back({encode(packet), std::move(memory)});
  if (endpoint.outbox.size() == 1) flush(endpoint);
}

void Endpoints::flush(Endpoint& endpoint) {
  auto& outbox = endpoint.outbox;
  while (!outbox.empty()) {
    const auto& next = outbox.front();
    const Sent sent = send_packet(endpoint.socket.get(), next.bytes, next.memory.get());
    if (sent == Sent::later) break;
    // Sent::never: the connection has ended, which read() is about to find, with what came before.
    outbox.pop_front();
  }
  if (endpoint.wants_room == !outbox.empty()) return;
  endpoint.wants_room = !outbox.empty();
  watch(endpoint.socket.get(), socket_entry(endpoint),
        EPOLLIN | (endpoint.wants_room ? static_cast<uint32_t>(EPOLLOUT) : 0u), EPOLL_CTL_MOD);
}

void Endpoints::give_up(const std::string& group, const std::string& reason) {
  if (why_given_up(group) != nullptr) return;  // the first reason stands
  given_up_.emplace_back(group, reason);
  if (given_up_.size() > kMostGivenUp) given_up_.pop_front();
}

void Endpoints::refuse(const std::string& group, const std::string& reason) {
  const Lock lock(mutex_);
  give_up(group, reason);
  for (auto& [token, endpoint] : endpoints_) {
    if (endpoint->waiting.erase(group) != 0) send_refusal(*endpoint, group, reason);
  }
}

void Endpoints::send_refusal(Endpoint& endpoint, const std::string& group,
                             const std::string& reason) {
  Packet answer;
  answer.kind = Kind::abort;
  answer.key = group;
  answer.text = reason;
  send(endpoint, answer, nullptr);
}

const std::string* Endpoints::why_given_up(const std::string& group) const {
  for (const auto& [key, reason] : given_up_) {
    if (key == group) return &reason;
  }
  return nullptr;
}

// ---- The thread ----

void Endpoints::run() {
  std::array<epoll_event, 64> events{};
  for (;;) {
    int patience;
    {
      const Lock lock(mutex_);
      patience = patience_ms();
    }
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), patience);
    const Lock lock(mutex_);
    if (stopping_) return;
    for (int i = 0; i < count; ++i) {
      const auto& event = events[static_cast<size_t>(i)];
      try {
        event.data.u64 == kListenerEntry ? accept_all() : handle(event.data.u64, event.events);
      } catch (const std::exception& error) {
        // The system has run out of something: groups that connect are told, others go on.
        report_starvation(error.what());
      }
    }
    turn_away_the_late();
  }
}

int Endpoints::patience_ms() const {
  if (!listening_) return listen_again_.remaining_ms(1000);
  if (!strangers_.empty()) return 1000;
  return -1;
}

void Endpoints::accept_all() {
  for (int i = 0; i < kPacketsAtOnce; ++i) {
    UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket) {
      admit(std::move(socket));
      continue;
    }
    if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
    // No descriptors: the connection stays in the queue, and epoll would report it for ever.
    report_starvation(errno_text("accept of a peer's connection"));
    watch(listener_.get(), kListenerEntry, 0, EPOLL_CTL_MOD);
    listening_ = false;
    listen_again_ = Deadline::after(kPauseWithoutDescriptors);
    return;
  }
}

void Endpoints::admit(UniqueFd socket) {
  Endpoint& endpoint = add(std::move(socket));
  endpoint.show_key_by = Deadline::after(kShowKeyWithin);
  strangers_.push_back(endpoint.token);
  // Most have said who they are by now.
  if (read(endpoint) == Read::ended) return end(endpoint, false);
  // The oldest goes: who knows the key shows it at once.
  if (strangers_.size() > kMostStrangers) end(*endpoints_.at(strangers_.front()), false);
}

void Endpoints::turn_away_the_late() {
  while (!strangers_.empty()) {
    Endpoint& oldest = *endpoints_.at(strangers_.front());
    if (!oldest.show_key_by.passed()) break;
    end(oldest, false);
  }
  if (!listening_ && listen_again_.passed()) {
    watch(listener_.get(), kListenerEntry, EPOLLIN, EPOLL_CTL_MOD);
    listening_ = true;
  }
}

void Endpoints::handle(uint64_t entry, uint32_t events) {
  const auto found = endpoints_.find(entry / 2);
  if (found == endpoints_.end()) return;  // it has gone since the event
  Endpoint& endpoint = *found->second;
  const bool died = entry % 2 == 1;
  if (!died && (events & EPOLLOUT) != 0) flush(endpoint);
  // What a process said last is read before its death is noted: it may have left in good order, and
  // an abort explains more.
  Read read_so_far = read(endpoint);
  while (died && read_so_far == Read::more) read_so_far = read(endpoint);
  if (died || read_so_far == Read::ended) return end(endpoint, died);
  if ((events & EPOLLOUT) != 0) drop_if_idle(endpoint);
}

Endpoints::Read Endpoints::read(Endpoint& endpoint) {
  std::array<char, kPacketBytes> buffer;
  for (int i = 0; i < kPacketsAtOnce; ++i) {
    Incoming incoming = receive_packet(endpoint.socket.get(), buffer);
    if (incoming.what == Incoming::What::closed) return Read::ended;
    if (incoming.what == Incoming::What::nothing) return Read::drained;
    if (!take(endpoint, std::move(incoming))) return Read::ended;
  }
  return Read::more;
}

bool Endpoints::take(Endpoint& endpoint, Incoming incoming) {
  const std::optional<Packet> packet = decode(incoming.bytes);
  if (endpoint.peer.empty()) {
    if (packet && take_hello(endpoint, *packet)) return true;
    strange_.say(concat("dropped a connection to this process's shared memory from ",
                        owner_of(endpoint.socket.get()),
                        ", which did not show its key: a process of another job or of an earlier "
                        "run, or no rank at all"));
    return false;
  }
  if (!packet) return true;
  if (incoming.attachment_lost) {
    errno = EMFILE;
    report_starvation(errno_text("receiving a peer's segment"));
  }
  if (packet->kind == Kind::open) take_open(endpoint, *packet, std::move(incoming.attachments));
  if (packet->kind == Kind::leave || packet->kind == Kind::abort) take_goodbye(endpoint, *packet);
  return true;
}

bool Endpoints::take_hello(Endpoint& endpoint, const Packet& packet) {
  if (packet.kind != Kind::hello || packet.key != address_.key) return false;
  endpoint.peer = packet.id;
  watch_process(endpoint);
  std::erase(strangers_, endpoint.token);
  return true;
}

void Endpoints::take_open(Endpoint& endpoint, const Packet& packet, Attachments memory) {
  if (const auto port = ports_.find(packet.key); port != ports_.end()) {
    return port->second->take_open(endpoint, packet, std::move(memory));
  }
  const std::string* reason = why_given_up(packet.key);
  const std::string crowded = "too many groups are opened that this process has not joined yet";
  if (reason == nullptr && endpoint.waiting.size() >= kMostWaiting) reason = &crowded;
  if (reason != nullptr) return send_refusal(endpoint, packet.key, *reason);
  endpoint.waiting[packet.key] = {packet, std::move(memory)};
}

void Endpoints::take_goodbye(Endpoint& endpoint, const Packet& packet) {
  if (const auto group = endpoint.groups.find(packet.key); group != endpoint.groups.end()) {
    return group->second->take_goodbye(endpoint, packet);
  }
  if (const auto waiting = endpoint.waiting.find(packet.key); waiting != endpoint.waiting.end()) {
    const int rank = waiting->second.open.from;
    give_up(packet.key, packet.kind == Kind::abort
                            ? packet.text
                            : concat("rank ", rank, " left while the group was connecting"));
    endpoint.waiting.erase(waiting);
    drop_if_idle(endpoint);
  }
}

// ---- The table ----

void Endpoints::watch_process(Endpoint& endpoint) {
  UniqueFd process = process_behind(endpoint.socket.get());
  if (!process) return;
  endpoint.pidfd = std::make_shared<UniqueFd>(std::move(process));
  watch(endpoint.pidfd->get(), socket_entry(endpoint) + 1, EPOLLIN, EPOLL_CTL_ADD);
}

void Endpoints::report_starvation(const std::string& text) {
  ++starvations_;
  starvation_ = text;
  news_.notify_all();
}

Endpoint& Endpoints::add(UniqueFd socket) {
  const uint64_t token = ++last_token_;
  auto endpoint = std::make_unique<Endpoint>();
  endpoint->token = token;
  endpoint->socket = std::move(socket);
  watch(endpoint->socket.get(), socket_entry(*endpoint), EPOLLIN, EPOLL_CTL_ADD);
  return *endpoints_.emplace(token, std::move(endpoint)).first->second;
}

void Endpoints::end(Endpoint& endpoint, bool died) {
  for (const auto& [key, port] : endpoint.groups) port->lose(endpoint, died);
  if (died) {
    for (const auto& [key, port] : ports_) port->bury(endpoint.peer);
  }
  erase(endpoint);
  news_.notify_all();
}

// What waits here or has not gone out keeps a connection, too.
void Endpoints::drop_if_idle(Endpoint& endpoint) {
  if (endpoint.peer.empty() || !endpoint.groups.empty()) return;
  if (endpoint.waiting.empty() && endpoint.outbox.empty()) erase(endpoint);
}

void Endpoints::erase(Endpoint& endpoint) {
  // A child that was forked behind our back may still hold copies: without these calls epoll would
  // go on reporting them, and the peer would see no end.
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, endpoint.socket.get(), nullptr);
  if (endpoint.pidfd) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, endpoint.pidfd->get(), nullptr);
  ::shutdown(endpoint.socket.get(), SHUT_RDWR);
  std::erase(strangers_, endpoint.token);
  if (const auto known = dialled_.find(endpoint.peer);
      known != dialled_.end() && known->second == &endpoint) {
    dialled_.erase(known);
  }
  endpoints_.erase(endpoint.token);
}

}  // namespace pycoll::shm
