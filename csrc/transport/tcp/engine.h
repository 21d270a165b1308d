// All of a process's TCP: its listening socket and IO thread, its links, and groups that are about
// to meet on them.
//
// Of two processes the one with the greater id dials; two ranks of one process use a link of the
// process with itself, whose dialing end is the greater rank's. A session is asked for by `open`
// from the dialing side and begins with the answer, which comes when the other rank connects too.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "transport/tcp/acceptor.h"
#include "transport/tcp/description.h"
#include "transport/tcp/link.h"

namespace pycoll::tcp {

class Engine final : public LinkOwner {
 public:
  // `buffer`: bytes of each connection's send buffer; 0 leaves it to the kernel.
  explicit Engine(std::shared_ptr<Descriptors> table, int buffer = 0);
  ~Engine() override;

  const Id& process() const { return process_; }
  const Id& secret() const { return secret_; }
  const std::shared_ptr<Descriptors>& table() const { return table_; }
  int buffer() const { return buffer_; }
  uint16_t port() const { return acceptor_->port(); }
  Starvation starvation() const { return acceptor_->starvation(); }

  uint32_t next_number();

  // The accepting side: the session opens when the peer asks for it.
  void expect(const std::shared_ptr<Session>& session);
  // The dialing side. Asks for the session over the link to that process, if there is one.
  bool ask(const std::shared_ptr<Session>& session, const Id& peer);
  // True when the caller is to dial that process: nobody else does. Then dialed() or gave_up().
  bool claim_dial(const Id& peer);
  void dialed(const Id& peer, Nanoseconds heartbeat, std::vector<Socket> sockets);
  void gave_up(const Id& peer);

  // The group is done with them: says goodbye, and ends the links that nobody uses any more once
  // what was sent is acknowledged, or after a while.
  void release(const std::vector<std::shared_ptr<Session>>& sessions);

  void on_open(const std::shared_ptr<Link>& link, const OpenBody& body) override;
  void on_opened(const std::shared_ptr<Link>& link, const OpenBody& body) override;
  void on_end(const std::shared_ptr<Link>& link) override;
  void park(std::shared_ptr<Connection> connection) override;

 private:
  struct Request {  // an `open` for which no rank was here yet
    std::weak_ptr<Link> link;
    uint32_t number = 0;  // of the peer's session
  };

  struct Asked {  // an `open` of ours that has no answer yet
    std::shared_ptr<Session> session;
    std::weak_ptr<Link> link;
  };

  Nanoseconds tick();
  Nanoseconds care_for_links(Clock::time_point now);
  void care_within(Nanoseconds delay);
  bool unpark();
  void accept(Accepted accepted);
  std::shared_ptr<Link> adopt(const Id& peer, Nanoseconds heartbeat, std::vector<Socket> sockets);
  bool answer(const std::shared_ptr<Session>& session, const std::shared_ptr<Link>& link,
              uint32_t remote_number);
  bool is_idle(const std::shared_ptr<Link>& link);
  void forget(const Session& session);
  static void turn_down(Link& link, uint32_t number);
  void close_unused(const std::vector<std::shared_ptr<Link>>& links);

  const std::shared_ptr<Descriptors> table_;
  const Id process_;
  const Id secret_;
  const int buffer_;

  // Taken by readers of connections while they hold one: under it, nothing of a connection is
  // locked but the sending side.
  std::mutex mutex_;
  uint32_t next_number_ = 1;
  std::map<SessionKey, std::shared_ptr<Session>> expected_;
  std::map<SessionKey, Request> requests_;
  std::deque<SessionKey> over_;  // the latest whose rank has come and gone
  std::map<SessionKey, Asked> asked_;
  std::map<Id, std::weak_ptr<Link>> dialed_;
  std::set<Id> dialing_;
  std::vector<std::shared_ptr<Link>> links_;  // until they end
  std::vector<std::shared_ptr<Connection>> parked_;
  Clock::time_point next_care_{};  // when links are looked after

  std::unique_ptr<IoThread> io_;
  std::shared_ptr<Acceptor> acceptor_;
};

}  // namespace pycoll::tcp
