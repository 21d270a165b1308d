#include "transport/shm/port.h"

#include "core/error.h"

namespace pycoll::shm {
namespace {

// A connection of its own that ends before an answer is dialled again that often: a busy peer may
// have taken it for a stranger's.
constexpr int kAttempts = 20;
// Signals are served that often while a group connects; a peer whose queue is full is dialled
// again.
constexpr Nanoseconds kLongestWait = std::chrono::milliseconds(50);

}  // namespace

Port::Port(std::shared_ptr<Endpoints> endpoints, const ConnectRequest& request,
           std::vector<Address> peers, Attachments memory)
    : endpoints_(std::move(endpoints)),
      key_(request.job_key),
      rank_(request.rank),
      deadline_(request.deadline),
      interrupt_(request.interrupt),
      lines_(peers.size()),
      memory_(std::make_shared<Attachments>(std::move(memory))) {
  for (size_t peer = 0; peer < peers.size(); ++peer) lines_[peer].address = std::move(peers[peer]);
  const Endpoints::Lock lock(endpoints_->mutex_);
  starvations_ = endpoints_->starvations_;
  if (const std::string* reason = endpoints_->why_given_up(key_)) {
    fail(ErrorKind::peer_failed, "rank ", rank_, " cannot join the group: ", *reason);
  }
  endpoints_->join(*this);
}

Port::~Port() {
  leave();
  const Endpoints::Lock lock(endpoints_->mutex_);
  endpoints_->part(*this);
  // A peer that has not opened yet would wait for an answer in vain.
  for (const Line& line : lines_) {
    if (line.complete()) continue;
    endpoints_->give_up(key_, last_word_);
    break;
  }
}

// ---- Connecting ----

bool Port::dials(const Line& line) const {
  return endpoints_->address().id > line.address.id;
}

void Port::open(const std::function<void(int, const Attachments&)>& map) {
  std::vector<std::pair<int, Attachments>> arrived;
  for (;;) {
    if (interrupt_) interrupt_();
    {
      Endpoints::Lock lock(endpoints_->mutex_);
      for (const auto& [peer, memory] : arrived) lines_[static_cast<size_t>(peer)].mapped = true;
      arrived.clear();
      for (size_t peer = 0; peer < lines_.size(); ++peer) {
        Line& line = lines_[peer];
        if (!line.complete()) advance(static_cast<int>(peer));
        if (line.memory.segment) arrived.emplace_back(peer, std::move(line.memory));
      }
      if (arrived.empty()) {
        if (missing().empty()) {
          memory_.reset();
          return;
        }
        check_progress();
        endpoints_->news_.wait_for(lock,
                                   std::min<Nanoseconds>(deadline_.remaining(), kLongestWait));
      }
    }
    // Without the lock: mapping may take a while.
    for (const auto& [peer, memory] : arrived) map(peer, memory);
  }
}

void Port::advance(int peer) {
  Line& line = lines_[static_cast<size_t>(peer)];
  if (line.sent) return;
  if (!dials(line)) {
    if (line.received) send_open(peer);
    return;
  }
  try {
    const Endpoints::Reached reached = endpoints_->reach(line.address);
    if (reached.endpoint == nullptr) return;
    line.reused = reached.reused;
    use(line, *reached.endpoint);
    send_open(peer);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::peer_failed) throw;
    fail(ErrorKind::peer_failed, "rank ", rank_, " cannot reach rank ", peer, ": ", error.what(),
         ". It seems to have died while the group was connecting, or the store still holds the "
         "keys of an earlier run: use a fresh one");
  }
}

void Port::use(Line& line, Endpoint& endpoint) {
  line.endpoint = &endpoint;
  if (endpoint.pidfd) line.process = endpoint.pidfd;
  endpoint.groups[key_] = this;
}

void Port::send_open(int peer) {
  Line& line = lines_[static_cast<size_t>(peer)];
  Packet packet;
  packet.kind = Kind::open;
  packet.key = key_;
  packet.from = rank_;
  packet.to = peer;
  line.sent = true;
  endpoints_->send(*line.endpoint, packet, memory_);
}

// Why waiting on is in vain.
void Port::check_progress() const {
  if (abort_) {
    fail(ErrorKind::peer_failed, "rank ", rank_, " cannot join the group: ", *abort_);
  }
  for (size_t peer = 0; peer < lines_.size(); ++peer) {
    const Line& line = lines_[peer];
    if (!line.used() || state(static_cast<int>(peer)) == PeerState::alive) continue;
    fail(ErrorKind::peer_failed, "rank ", rank_, ": rank ", peer,
         state(static_cast<int>(peer)) == PeerState::died ? " died" : " gave up",
         " while the group was connecting");
  }
  if (endpoints_->starvations_ != starvations_) {
    fail(ErrorKind::system, "rank ", rank_, " cannot connect to rank(s) ", missing(), ": ",
         endpoints_->starvation_,
         ". A process needs two descriptors for each other process of its host");
  }
  if (deadline_.passed()) {
    fail(ErrorKind::timed_out, "rank ", rank_, " waited in vain for rank(s) ", missing(),
         " to connect over shared memory (PYCOLL_CONNECT_TIMEOUT sets the limit)");
  }
}

std::string Port::missing() const {
  std::string ranks;
  for (size_t peer = 0; peer < lines_.size(); ++peer) {
    if (!lines_[peer].complete()) ranks += concat(ranks.empty() ? "" : ", ", peer);
  }
  return ranks;
}

// ---- What comes from the connections ----

int Port::rank_of(const Endpoint& endpoint) const {
  for (size_t peer = 0; peer < lines_.size(); ++peer) {
    if (lines_[peer].endpoint == &endpoint) return static_cast<int>(peer);
  }
  return -1;
}

void Port::take_open(Endpoint& endpoint, const Packet& packet, Attachments memory) {
  const bool fits =
      packet.to == rank_ && packet.from >= 0 && static_cast<size_t>(packet.from) < lines_.size();
  if (!fits) return;
  Line& line = lines_[static_cast<size_t>(packet.from)];
  // Only on the connection that leads to that rank, and once.
  if (line.address.id != endpoint.peer || line.received) return;
  if (dials(line) && line.endpoint != &endpoint) return;
  use(line, endpoint);
  // There was no descriptor left for it: this rank is about to give up, and the peer hears of that.
  if (!memory.segment) return;
  line.received = true;
  line.memory = std::move(memory);
  endpoints_->news_.notify_all();
}

void Port::take_goodbye(Endpoint& endpoint, const Packet& packet) {
  const int peer = rank_of(endpoint);
  if (peer < 0) return;
  if (packet.kind == Kind::abort) set_abort(packet.text);
  if (packet.kind == Kind::leave) set_state(lines_[static_cast<size_t>(peer)], PeerState::left);
}

void Port::lose(Endpoint& endpoint, bool died) {
  const int peer = rank_of(endpoint);
  if (peer < 0) return;
  Line& line = lines_[static_cast<size_t>(peer)];
  line.endpoint = nullptr;
  if (died || (line.sent && line.received)) return set_state(line, PeerState::died);
  // Not an exchange yet. The peer had dropped a connection that was there before, or its group gave
  // up: the dialling side tries again, and learns by that whether the peer lives.
  line.sent = false;
  line.received = false;
  line.memory = {};
  if (!line.reused && ++line.attempts >= kAttempts) set_state(line, PeerState::left);
}

void Port::bury(const std::string& id) {
  for (Line& line : lines_) {
    if (line.used() && line.address.id == id && !line.complete()) set_state(line, PeerState::died);
  }
}

void Port::set_state(Line& line, PeerState state) {
  if (line.state.load(std::memory_order_relaxed) != PeerState::alive) return;  // the first stands
  line.state.store(state, std::memory_order_release);
  if (on_news_) on_news_();
  endpoints_->news_.notify_all();
}

void Port::set_abort(const std::string& reason) {
  if (abort_) return;
  abort_ = reason;
  aborted_.store(true, std::memory_order_release);
  if (on_news_) on_news_();
  endpoints_->news_.notify_all();
}

// ---- What the group says and asks ----

void Port::on_news(std::function<void()> callback) {
  const Endpoints::Lock lock(endpoints_->mutex_);
  on_news_ = std::move(callback);
}

std::optional<std::string> Port::peer_abort() {
  // Most often there is none: no lock then. Acquire: pairs with set_abort().
  if (!aborted_.load(std::memory_order_acquire)) return std::nullopt;
  const Endpoints::Lock lock(endpoints_->mutex_);
  return abort_;
}

void Port::tell_all(const Packet& packet) {
  for (Line& line : lines_) {
    if (line.endpoint != nullptr) endpoints_->send(*line.endpoint, packet, nullptr);
  }
}

void Port::send_abort(const std::string& reason) {
  const Endpoints::Lock lock(endpoints_->mutex_);
  Packet packet;
  packet.kind = Kind::abort;
  packet.key = key_;
  packet.text = reason;
  tell_all(packet);
  if (last_word_.empty()) last_word_ = reason;
}

void Port::leave() {
  const Endpoints::Lock lock(endpoints_->mutex_);
  if (left_) return;
  left_ = true;
  Packet packet;
  packet.kind = Kind::leave;
  packet.key = key_;
  tell_all(packet);
  if (last_word_.empty())
    last_word_ = concat("rank ", rank_, " left while the group was connecting");
}

}  // namespace pycoll::shm
