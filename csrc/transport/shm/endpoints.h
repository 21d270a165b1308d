// The connections of this process to the other processes of its host: one a pair, shared by all
// groups of the pair, and one thread that accepts, reads and sees deaths.
//
// Of two processes, the one with the greater id dials. It shows the key of whom it dials (both are
// in the store), so a stranger gets nothing. Then each group opens on the connection: the dialling
// side sends `open` with its segment, the other answers with its own on the same connection, once
// its own group is there. A connection stays while a group uses it; either side may drop it after
// that, just when the other wants to use it again: then the dialling side sees the end before an
// answer, and dials anew.
//
// Everything here is guarded by one mutex, a leaf: nothing is waited for under it, so that fork(2)
// can hold it. Descriptors are made and closed under it only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/fd.h"
#include "core/occasional_log.h"
#include "transport/shm/packet.h"

namespace pycoll::shm {

class Port;

// Where and how a process is dialled, as the store's record says.
struct Address {
  std::string id;      // random, of the process
  std::string key;     // random, to be shown by who dials
  std::string socket;  // abstract name
};

// A connection. Guarded by the mutex of Endpoints, which owns it.
struct Endpoint {
  uint64_t token = 0;
  UniqueFd socket;
  // Of the peer; shared with its groups, which may ask when the connection has ended. Without one,
  // nullptr, a death is seen as the end of the socket.
  std::shared_ptr<UniqueFd> pidfd;
  std::string peer;  // id of its process; empty until it has shown the key
  Deadline show_key_by = Deadline::after(kNoLimit);

  std::map<std::string, Port*> groups;  // by key: those of this process that use it

  // A group that the peer has opened and this process has not joined yet.
  struct Waiting {
    Packet open;
    Attachments memory;
  };
  std::map<std::string, Waiting> waiting;

  struct Outgoing {
    std::string bytes;
    std::shared_ptr<const Attachments> memory;  // or nullptr
  };
  std::deque<Outgoing> outbox;  // while the socket is full
  bool wants_room = false;      // epoll tells when it is not
};

class Endpoints {
 public:
  // Listens. Throws Error(system) when the operating system does not let it.
  Endpoints();
  ~Endpoints();
  Endpoints(const Endpoints&) = delete;
  Endpoints& operator=(const Endpoints&) = delete;

  const Address& address() const { return address_; }

  // This process will not join that group: peers that have opened it are told why, and so are those
  // that come later.
  void refuse(const std::string& group, const std::string& reason);

  // Around fork(2): the child closes what it inherited, and that is all it does here.
  void before_fork() { mutex_.lock(); }
  void after_fork_parent() { mutex_.unlock(); }
  void after_fork_child();

 private:
  friend class Port;  // one group's part of all this; works under mutex_

  using Lock = std::unique_lock<std::mutex>;

  // A group joins and parts. Opens that came before are given to it.
  void join(Port& port);
  void part(Port& port);
  // The connection to that process, dialled if there is none; none when its queue is full.
  struct Reached {
    Endpoint* endpoint = nullptr;
    bool reused = false;
  };
  Reached reach(const Address& address);
  void send(Endpoint& endpoint, const Packet& packet, std::shared_ptr<const Attachments> memory);
  void give_up(const std::string& group, const std::string& reason);
  void send_refusal(Endpoint& endpoint, const std::string& group, const std::string& reason);
  const std::string* why_given_up(const std::string& group) const;

  void run();
  int patience_ms() const;
  void accept_all();
  void admit(UniqueFd socket);
  void turn_away_the_late();
  void handle(uint64_t entry, uint32_t events);
  void flush(Endpoint& endpoint);
  enum class Read { drained, more, ended };
  Read read(Endpoint& endpoint);
  bool take(Endpoint& endpoint, Incoming incoming);
  bool take_hello(Endpoint& endpoint, const Packet& packet);
  void take_open(Endpoint& endpoint, const Packet& packet, Attachments memory);
  void take_goodbye(Endpoint& endpoint, const Packet& packet);
  void end(Endpoint& endpoint, bool died);
  void drop_if_idle(Endpoint& endpoint);
  void erase(Endpoint& endpoint);
  Endpoint& add(UniqueFd socket);
  void watch_process(Endpoint& endpoint);
  void report_starvation(const std::string& text);
  void watch(int fd, uint64_t entry, uint32_t events, int how) const;

  Address address_;
  std::mutex mutex_;
  std::condition_variable news_;  // for groups that connect
  UniqueFd epoll_;
  UniqueFd stop_;  // an eventfd
  UniqueFd listener_;
  bool listening_ = true;
  Deadline listen_again_ = Deadline::after(Nanoseconds(0));
  // How often connections could not be taken for want of descriptors, and why.
  uint64_t starvations_ = 0;
  std::string starvation_;
  OccasionalLog strange_;  // who did not know the key
  bool stopping_ = false;
  uint64_t last_token_ = 0;
  std::map<uint64_t, std::unique_ptr<Endpoint>> endpoints_;  // by token
  std::deque<uint64_t> strangers_;                           // oldest first
  std::map<std::string, Endpoint*> dialled_;                 // by the peer's id
  std::map<std::string, Port*> ports_;                       // by the group's key
  // Groups that failed while they connected, the last few: who comes late is told at once.
  std::deque<std::pair<std::string, std::string>> given_up_;
  std::thread thread_;
};

}  // namespace pycoll::shm
