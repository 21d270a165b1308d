// How a group's ranks meet over TCP: a session for each peer, on a link that is there already or is
// dialed now.
#include <poll.h>

#include <algorithm>

#include "core/error.h"
#include "core/host.h"
#include "transport/tcp/dial.h"
#include "transport/tcp/engine.h"
#include "transport/tcp/tcp_transport.h"

namespace pycoll::tcp {
namespace {

// Signals are served that often, and links that another thread has dialed are found.
constexpr Nanoseconds kLongestSleep = std::chrono::milliseconds(20);

// A group while it connects.
class Meeting {
 public:
  Meeting(const ConnectRequest& request, Engine& engine)
      : request_(request),
        engine_(engine),
        board_(std::make_shared<Board>()),
        starvations_before_(engine.starvation().times),
        mine_(description_of(request.rank)),
        sessions_(static_cast<size_t>(request.world_size)) {}
  ~Meeting() {
    for (Opening& each : openings_) stop_dialing(each);
    if (!done_) engine_.release(sessions_);
  }

  void run() {
    for (int peer = 0; peer < request_.world_size; ++peer) {
      if (serves(peer)) add(peer);
    }
    while (!openings_.empty()) {
      if (request_.interrupt) request_.interrupt();
      for (Opening& each : openings_) {
        if (each.dials) advance(each);
      }
      std::erase_if(openings_, [](const Opening& each) { return each.session->is_open(); });
      if (openings_.empty()) break;
      check_peers();
      check_starvation();
      if (request_.deadline.passed()) report_missing();
      wait();
    }
    done_ = true;
  }

  // Tells those that this rank has reached why it gives up.
  void send_abort(const std::string& why) {
    const std::string text =
        concat("rank ", request_.rank, " gave up while the group was connecting: ", why);
    for (const auto& session : sessions_) {
      if (session) session->send_abort(text);
    }
  }

  std::shared_ptr<Board> board() const { return board_; }
  std::vector<std::shared_ptr<Session>> sessions() const { return sessions_; }

 private:
  struct Opening {
    int peer = 0;
    Description theirs;
    std::shared_ptr<Session> session;
    bool dials = false;
    bool asked = false;
    std::unique_ptr<Dial> dial;
  };

  Description description_of(int rank) const {
    return Description::parse(request_.descriptions[static_cast<size_t>(rank)]);
  }

  bool serves(int peer) const {
    if (peer == request_.rank) return false;
    return request_.serves.empty() || request_.serves[static_cast<size_t>(peer)];
  }

  void add(int peer) {
    Opening opening;
    opening.peer = peer;
    opening.theirs = description_of(peer);
    if (!opening.theirs.is_valid()) {
      fail(ErrorKind::peer_failed, "rank ", peer, " offers no TCP address");
    }
    const SessionKey key{request_.job_key, request_.rank, peer};
    opening.session =
        std::make_shared<Session>(key, engine_.next_number(), request_.geometry, board_);
    sessions_[static_cast<size_t>(peer)] = opening.session;
    const Id& own = engine_.process();
    opening.dials =
        own == opening.theirs.process ? request_.rank > peer : own > opening.theirs.process;
    if (!opening.dials) engine_.expect(opening.session);
    openings_.push_back(std::move(opening));
  }

  void advance(Opening& each) {
    if (each.session->is_unwanted()) {
      fail(ErrorKind::peer_failed, "rank ", request_.rank, ": rank ", each.peer,
           " gave up while the group was connecting");
    }
    // The peer may have dropped the link while we asked over it.
    if (each.session->take_refusal()) each.asked = false;
    if (!each.asked) each.asked = engine_.ask(each.session, each.theirs.process);
    if (each.asked) return stop_dialing(each);
    if (!each.dial && engine_.claim_dial(each.theirs.process)) {
      each.dial = std::make_unique<Dial>(mine_, each.theirs, engine_.table(), engine_.buffer());
      if (each.dial->is_hopeless()) report_unreachable(each);
    }
    if (!each.dial) return;
    const auto now = Clock::now();
    if (!each.dial->advance(now)) {
      if (each.dial->is_refused(now)) report_gone(each);
      return;
    }
    const auto heartbeat = std::chrono::milliseconds(each.theirs.heartbeat_ms);
    engine_.dialed(each.theirs.process, heartbeat, each.dial->take());
    each.dial.reset();
    each.asked = engine_.ask(each.session, each.theirs.process);
  }

  // Another thread's dial may have been through between our look for a link and our claim.
  void stop_dialing(Opening& each) {
    if (each.dial) engine_.gave_up(each.theirs.process);
    each.dial.reset();
  }

  void wait() {
    Nanoseconds patience = std::min(kLongestSleep, request_.deadline.remaining());
    std::vector<pollfd> entries;
    for (const Opening& each : openings_) {
      if (!each.dial) continue;
      each.dial->add_to(entries);
      patience = std::min<Nanoseconds>(patience, each.dial->due() - Clock::now());
    }
    patience = std::max<Nanoseconds>(patience, std::chrono::microseconds(500));
    if (entries.empty()) {
      board_->prepare_sleep();
      const auto is_open = [](const Opening& each) { return each.session->is_open(); };
      if (std::any_of(openings_.begin(), openings_.end(), is_open)) return board_->cancel_sleep();
      return board_->sleep(patience);
    }
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(patience).count();
    ::poll(entries.data(), entries.size(), static_cast<int>(ms));
  }

  // One that has been reached and goes again has given up: the group does not come to be.
  void check_peers() const {
    if (const auto reason = board_->peer_abort()) {
      fail(ErrorKind::peer_failed, "rank ", request_.rank, " cannot join the group: ", *reason);
    }
    for (size_t peer = 0; peer < sessions_.size(); ++peer) {
      if (!sessions_[peer] || sessions_[peer]->state() == PeerState::alive) continue;
      fail(ErrorKind::peer_failed, "rank ", request_.rank, ": rank ", peer,
           sessions_[peer]->state() == PeerState::died ? " died" : " gave up",
           " while the group was connecting");
    }
  }

  // Peers cannot tell: to them this rank is one that does not answer.
  void check_starvation() const {
    const Starvation starvation = engine_.starvation();
    if (starvation.times == starvations_before_) return;
    std::string missing;
    for (const Opening& each : openings_) missing += concat(missing.empty() ? "" : ", ", each.peer);
    fail(ErrorKind::system, "rank ", request_.rank, " cannot connect to rank(s) ", missing, ": ",
         starvation.reason, ". A process needs ", mine_.connections,
         " descriptors for each other process");
  }

  [[noreturn]] void report_gone(const Opening& each) const {
    fail(ErrorKind::peer_failed, "rank ", request_.rank, " cannot reach rank ", each.peer, ": ",
         each.dial->report(),
         ". It seems to have died while the group was connecting, or the store still holds the "
         "keys of an earlier run: use a fresh one");
  }

  [[noreturn]] void report_unreachable(const Opening& each) const {
    fail(ErrorKind::peer_failed, "rank ", request_.rank, " cannot reach rank ", each.peer,
         " over TCP: it has the address(es) ", addresses_of(each.theirs),
         ", which are link-local, and no interface of this host that may be used has one of that "
         "family. PYCOLL_SOCKET_IFNAME chooses the interface");
  }

  [[noreturn]] void report_missing() const {
    std::string text;
    for (const Opening& each : openings_) {
      text += concat(text.empty() ? "" : " | ", "rank ", each.peer, ": ");
      if (each.asked) {
        text += "connected, but it has not joined this group";
      } else if (each.dial) {
        text += concat("tried ", each.dial->report());
      } else if (each.dials) {
        text += "another group of this process was dialing it in vain";
      } else {
        text += concat("it did not connect to any of ", addresses_of(mine_));
      }
    }
    fail(ErrorKind::timed_out, "rank ", request_.rank, " of ", request_.world_size,
         " waited in vain to connect over TCP. ", text,
         ". Are those processes running, and can the hosts reach each other on these addresses? "
         "PYCOLL_SOCKET_IFNAME chooses the interface, PYCOLL_CONNECT_TIMEOUT sets the limit");
  }

  static std::string addresses_of(const Description& description) {
    std::string text;
    for (const InterfaceAddress& each : description.addresses) {
      text += concat(text.empty() ? "" : ", ", each.address.to_string(), " (interface ",
                     each.interface, ")");
    }
    return text;
  }

  const ConnectRequest& request_;
  Engine& engine_;
  std::shared_ptr<Board> board_;
  const uint64_t starvations_before_;
  Description mine_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::vector<Opening> openings_;  // those that are not open yet
  bool done_ = false;
};

}  // namespace

TcpConnector::TcpConnector(int socket_buffer)
    : socket_buffer_(socket_buffer), table_(std::make_shared<Descriptors>()) {}

TcpConnector::~TcpConnector() = default;

std::shared_ptr<Engine> TcpConnector::engine() {
  const std::lock_guard lock(mutex_);
  if (!engine_) engine_ = std::make_shared<Engine>(table_, socket_buffer_);
  return engine_;
}

std::string TcpConnector::describe(const Config& config) {
  // First: a wrong interface is an error before anything is opened.
  std::vector<InterfaceAddress> addresses =
      choose_addresses(config.socket_ifname, config.store_host);
  const auto engine = this->engine();
  Description description;
  description.process = engine->process();
  description.secret = engine->secret();
  description.host = network_identity();
  description.interfaces = config.socket_ifname;
  description.connections = static_cast<uint32_t>(config.tcp_connections);
  description.heartbeat_ms = static_cast<uint32_t>(config.heartbeat * 1000);
  for (InterfaceAddress& each : addresses) {
    each.address = each.address.with_port(engine->port());
    description.addresses.push_back(std::move(each));
  }
  return description.to_text();
}

std::string TcpConnector::why_not(const std::string& description, const std::string& other) {
  const Description a = Description::parse(description);
  const Description b = Description::parse(other);
  if (!a.is_valid() || !b.is_valid()) return "a rank offers no TCP address";
  const auto reachable = [](const Description& from, const Description& to) {
    return from.host == to.host ||
           std::any_of(to.addresses.begin(), to.addresses.end(), [&](const auto& address) {
             return !address.address.is_loopback() &&
                    std::any_of(from.addresses.begin(), from.addresses.end(), [&](const auto& own) {
                      return own.address.family() == address.address.family() &&
                             !own.address.is_loopback();
                    });
           });
  };
  if (reachable(a, b) && reachable(b, a)) return "";
  return "they run on different hosts and have no addresses of one family but loopback "
         "(PYCOLL_SOCKET_IFNAME chooses the interface)";
}

std::unique_ptr<Transport> TcpConnector::connect(const ConnectRequest& request) {
  const auto engine = this->engine();
  Meeting meeting(request, *engine);
  try {
    meeting.run();
  } catch (const std::exception& error) {
    meeting.send_abort(error.what());
    throw;
  }
  return std::make_unique<TcpTransport>(engine, meeting.board(), meeting.sessions());
}

void TcpConnector::before_fork() {
  mutex_.lock();
  table_->before_fork();
}

void TcpConnector::after_fork_parent() {
  table_->after_fork_parent();
  mutex_.unlock();
}

void TcpConnector::after_fork_child() {
  table_->after_fork_child();
  // The engine's thread and its state are the parent's: this copy is left as it is, for ever.
  if (engine_) new std::shared_ptr<Engine>(std::move(engine_));
  table_ = std::make_shared<Descriptors>();
  mutex_.unlock();
}

}  // namespace pycoll::tcp
