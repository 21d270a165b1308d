// The listening socket of a process, and connections that have not shown yet whose they are.
//
// Anybody can connect. Until a connection has shown this process's secret it may send one Hello,
// has a few seconds for it and costs a few hundred bytes; there are never more than some hundred of
// them, the oldest give way. Strangers are not answered. Everything here runs in the IO thread,
// except construction and starvation().
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/occasional_log.h"
#include "transport/tcp/descriptors.h"
#include "transport/tcp/frame.h"
#include "transport/tcp/io_thread.h"

namespace pycoll::tcp {

// A link whose connections are all there.
struct Accepted {
  Hello hello;
  std::vector<Socket> sockets;
};

// Connections could not be taken for want of descriptors or memory, how often and why the last
// time.
struct Starvation {
  uint64_t times = 0;
  std::string reason;
};

struct AcceptorIdentity {
  Id process{};
  Id secret{};
  int buffer = 0;  // of prepare_connection()
};

class Acceptor final : public IoHandler, public std::enable_shared_from_this<Acceptor> {
 public:
  // Throws Error(system) when nothing can be listened on.
  Acceptor(const AcceptorIdentity& identity, std::shared_ptr<Descriptors> table, IoThread& io,
           std::function<void(Accepted)> on_link);
  void start();

  uint16_t port() const { return port_; }
  Starvation starvation() const;
  void on_events(uint32_t events) override;
  // When it wants to be called again.
  Nanoseconds tick(Clock::time_point now);

 private:
  class Handshake;
  struct Forming {
    Hello hello;
    std::vector<Socket> sockets;
    Clock::time_point until{};
  };
  using FormingKey = std::pair<Id, Id>;  // process, link

  void take(Socket socket);
  void report_starvation(const std::string& reason);
  // A hello came; false when it is a stranger's.
  bool admit(const Hello& hello, Socket& socket);
  void drop(const Handshake* handshake);
  void report_stranger(int socket);

  const AcceptorIdentity identity_;
  const std::shared_ptr<Descriptors> table_;
  IoThread& io_;
  const std::function<void(Accepted)> on_link_;
  uint16_t port_ = 0;  // before socket_: found when it is bound
  Socket socket_;
  uint64_t registration_ = 0;
  bool pausing_ = false;                               // out of descriptors
  std::deque<std::shared_ptr<Handshake>> unfinished_;  // the oldest first
  std::map<FormingKey, Forming> forming_;
  mutable std::mutex starvation_mutex_;  // a leaf
  Starvation starvation_;                // guarded by starvation_mutex_
  OccasionalLog strange_;                // who did not know the secret
};

}  // namespace pycoll::tcp
