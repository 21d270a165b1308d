#include "transport/tcp/engine.h"

#include <algorithm>
#include <thread>

#include "core/error.h"
#include "core/random.h"

namespace pycoll::tcp {
namespace {

// How long the end of a link waits for the peer's kernel to acknowledge what was sent: closing
// before that can lose it.
constexpr Nanoseconds kDrainPatience = std::chrono::seconds(2);
// Requests for sessions that no rank has come for.
constexpr size_t kMostRequests = 4096;
// Sessions that are remembered after their end, for a peer that asks for them too late.
constexpr size_t kMostOver = 256;
constexpr Nanoseconds kParkTick = std::chrono::milliseconds(1);

SessionKey turned(const SessionKey& key) {
  return {key.group, key.remote, key.local};
}

}  // namespace

Engine::Engine(std::shared_ptr<Descriptors> table, int buffer)
    : table_(std::move(table)),
      process_(to_id(random_name())),
      secret_(to_id(random_name())),
      buffer_(buffer) {
  io_ = std::make_unique<IoThread>(table_, [this] { return tick(); });
  acceptor_ = std::make_shared<Acceptor>(AcceptorIdentity{process_, secret_, buffer_}, table_, *io_,
                                         [this](Accepted link) { accept(std::move(link)); });
  acceptor_->start();
  io_->start();
}

Engine::~Engine() {
  io_->stop();
  for (const auto& link : links_) link->close();
  links_.clear();
  parked_.clear();
  acceptor_.reset();  // before the IO thread's table, from which its sockets go
}

uint32_t Engine::next_number() {
  const std::lock_guard lock(mutex_);
  if (next_number_ == 0) ++next_number_;  // 0 names no session
  return next_number_++;
}

std::shared_ptr<Link> Engine::adopt(const Id& peer, Nanoseconds heartbeat,
                                    std::vector<Socket> sockets) {
  auto link = std::make_shared<Link>(*this, peer, heartbeat);
  try {
    const std::lock_guard lock(mutex_);
    links_.push_back(link);
    // Its frames are read by the IO thread from here on: it waits for mutex_ where it needs it.
    link->start(std::move(sockets), *io_);
  } catch (...) {
    // epoll takes no more: a link that is half watched would hang its groups.
    {
      const std::lock_guard lock(mutex_);
      std::erase(links_, link);
    }
    link->close();
    throw;
  }
  care_within(heartbeat / 4);
  return link;
}

void Engine::accept(Accepted accepted) {
  adopt(accepted.hello.process, std::chrono::milliseconds(accepted.hello.heartbeat_ms),
        std::move(accepted.sockets));
}

bool Engine::claim_dial(const Id& peer) {
  const std::lock_guard lock(mutex_);
  return dialing_.insert(peer).second;
}

void Engine::gave_up(const Id& peer) {
  const std::lock_guard lock(mutex_);
  dialing_.erase(peer);
}

void Engine::dialed(const Id& peer, Nanoseconds heartbeat, std::vector<Socket> sockets) {
  const auto link = adopt(peer, heartbeat, std::move(sockets));
  const std::lock_guard lock(mutex_);
  dialing_.erase(peer);
  dialed_[peer] = link;
}

bool Engine::ask(const std::shared_ptr<Session>& session, const Id& peer) {
  const std::lock_guard lock(mutex_);
  const auto known = dialed_.find(peer);
  const auto link = known == dialed_.end() ? nullptr : known->second.lock();
  if (!link || !link->attach(session)) return false;
  asked_[session->key()] = {session, link};
  link->send_open(FrameKind::open, {session->key(), session->number()});
  return true;
}

bool Engine::answer(const std::shared_ptr<Session>& session, const std::shared_ptr<Link>& link,
                    uint32_t remote_number) {
  if (!link->attach(session)) return false;
  expected_.erase(session->key());
  link->send_open(FrameKind::opened, {session->key(), session->number()});
  session->open(link, remote_number);
  return true;
}

void Engine::expect(const std::shared_ptr<Session>& session) {
  const std::lock_guard lock(mutex_);
  expected_[session->key()] = session;
  const auto request = requests_.find(session->key());
  if (request == requests_.end()) return;
  const Request found = request->second;
  requests_.erase(request);
  if (const auto link = found.link.lock()) answer(session, link, found.number);
}

void Engine::on_open(const std::shared_ptr<Link>& link, const OpenBody& body) {
  const std::lock_guard lock(mutex_);
  // A link that is being closed is no place for a session: its end makes the peer ask again.
  if (std::find(links_.begin(), links_.end(), link) == links_.end()) return;
  const SessionKey key = turned(body.key);
  const auto session = expected_.find(key);
  if (session != expected_.end()) {
    answer(std::shared_ptr<Session>(session->second), link, body.number);
    return;
  }
  if (std::find(over_.begin(), over_.end(), key) != over_.end()) {
    return turn_down(*link, body.number);
  }
  if (requests_.size() >= kMostRequests) requests_.erase(requests_.begin());
  requests_[key] = {link, body.number};
}

void Engine::on_opened(const std::shared_ptr<Link>& link, const OpenBody& body) {
  const std::lock_guard lock(mutex_);
  const auto asked = asked_.find(turned(body.key));
  if (asked != asked_.end() && asked->second.link.lock() == link) {
    const auto session = std::move(asked->second.session);
    asked_.erase(asked);
    session->open(link, body.number);
    return;
  }
  turn_down(*link, body.number);  // the rank that asked has given up
}

// So that a rank does not wait for one that will not come.
void Engine::turn_down(Link& link, uint32_t number) {
  FrameHeader header;
  header.kind = FrameKind::leave;
  header.session = number;
  link.send_on_all(header);
}

void Engine::on_end(const std::shared_ptr<Link>& link) {
  if (!link->has_ended()) {
    care_within(std::chrono::milliseconds(250));  // ends the rest of it
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    std::erase(links_, link);
    std::erase_if(dialed_, [&](const auto& each) { return each.second.lock() == link; });
    std::erase_if(requests_, [&](const auto& each) { return each.second.link.lock() == link; });
  }
  link->close();
}

void Engine::forget(const Session& session) {
  over_.push_back(session.key());
  if (over_.size() > kMostOver) over_.pop_front();
  const auto request = requests_.find(session.key());
  if (request != requests_.end()) {
    if (const auto link = request->second.link.lock()) turn_down(*link, request->second.number);
    requests_.erase(request);
  }
  const auto expected = expected_.find(session.key());
  if (expected != expected_.end() && expected->second.get() == &session) expected_.erase(expected);
  const auto asked = asked_.find(session.key());
  if (asked == asked_.end() || asked->second.session.get() != &session) return;
  if (const auto link = asked->second.link.lock()) link->detach(session.number());
  asked_.erase(asked);
}

bool Engine::is_idle(const std::shared_ptr<Link>& link) {
  return !link->is_used() && std::none_of(requests_.begin(), requests_.end(), [&](const auto& r) {
    return r.second.link.lock() == link;
  });
}

void Engine::release(const std::vector<std::shared_ptr<Session>>& sessions) {
  std::vector<std::shared_ptr<Link>> links;
  for (const auto& session : sessions) {
    if (!session) continue;
    std::shared_ptr<Link> link;
    {
      const std::lock_guard lock(mutex_);
      const auto asked = asked_.find(session->key());
      if (asked != asked_.end()) link = asked->second.link.lock();
      forget(*session);
    }
    if (session->is_open()) {
      session->leave();
      link = session->link();
      link->detach(session->number());
    }
    if (link && std::find(links.begin(), links.end(), link) == links.end()) links.push_back(link);
  }
  close_unused(links);
}

void Engine::close_unused(const std::vector<std::shared_ptr<Link>>& links) {
  const Deadline deadline = Deadline::after(kDrainPatience);
  for (const auto& link : links) {
    const auto idle = [&] {
      const std::lock_guard lock(mutex_);
      return is_idle(link);
    };
    while (idle() && !link->drained() && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    {
      const std::lock_guard lock(mutex_);
      if (!is_idle(link)) continue;
      std::erase(links_, link);
      std::erase_if(dialed_, [&](const auto& each) { return each.second.lock() == link; });
    }
    link->close();
  }
}

void Engine::park(std::shared_ptr<Connection> connection) {
  {
    const std::lock_guard lock(mutex_);
    // Once, though it may have been woken and parked again since the last tick.
    const auto known = std::find(parked_.begin(), parked_.end(), connection);
    if (known == parked_.end()) parked_.push_back(std::move(connection));
  }
  io_->tick_within(kParkTick);
}

bool Engine::unpark() {
  std::vector<std::shared_ptr<Connection>> parked;
  {
    const std::lock_guard lock(mutex_);
    parked.swap(parked_);
  }
  std::erase_if(parked, [](const auto& each) { return !each->unpark_when_unused(); });
  const std::lock_guard lock(mutex_);
  parked_.insert(parked_.end(), parked.begin(), parked.end());
  return !parked_.empty();
}

Nanoseconds Engine::care_for_links(Clock::time_point now) {
  std::vector<std::shared_ptr<Link>> links;
  {
    const std::lock_guard lock(mutex_);
    links = links_;
  }
  Nanoseconds next = std::chrono::hours(1);
  for (const auto& link : links) {
    link->look_after(now);
    next =
        std::min(next, std::max<Nanoseconds>(link->heartbeat() / 4, std::chrono::milliseconds(50)));
  }
  return next;
}

void Engine::care_within(Nanoseconds delay) {
  {
    const std::lock_guard lock(mutex_);
    next_care_ = std::min(next_care_, Clock::now() + delay);
  }
  io_->tick_within(delay);
}

Nanoseconds Engine::tick() {
  const auto now = Clock::now();
  Nanoseconds next = acceptor_->tick(now);
  bool care = false;
  {
    const std::lock_guard lock(mutex_);
    care = now >= next_care_;
    if (care) next_care_ = now + std::chrono::hours(1);
  }
  if (care) care_within(care_for_links(now));
  {
    const std::lock_guard lock(mutex_);
    next = std::min<Nanoseconds>(next, next_care_ - now);
  }
  if (unpark()) next = std::min<Nanoseconds>(next, kParkTick);
  return std::max<Nanoseconds>(next, std::chrono::microseconds(100));
}

}  // namespace pycoll::tcp
