// TCP between processes, to the contract of transport/transport.h.
//
// A process has one Engine: a listening socket, an IO thread, and one link (a few connections) to
// each process that it shares a group with. A group's transport has a session on a link for each
// peer. Memory of peers cannot be read: there is no window.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "transport/tcp/descriptors.h"
#include "transport/tcp/session.h"
#include "transport/transport.h"

namespace pycoll::tcp {

class Engine;

class TcpTransport final : public Transport {
 public:
  // `sessions` by rank, open; none for this rank and those that other transports serve.
  TcpTransport(std::shared_ptr<Engine> engine, std::shared_ptr<Board> board,
               std::vector<std::shared_ptr<Session>> sessions);
  ~TcpTransport() override;

  const char* name() const override { return "tcp"; }
  SendEnd& sender(int peer, int channel) override;
  RecvEnd& receiver(int peer, int channel) override;
  Window* window() override { return nullptr; }

  void announce(const CallHeader& call) override;
  void announce_elsewhere(const CallHeader& call) override;
  std::optional<CallHeader> call_of(int peer, uint64_t sequence) override;
  std::optional<CallHeader> latest_call_of(int peer) override;
  void inquire() override;

  void say_ready(int stage) override;
  int ready_stage(int peer) override;

  void prepare_sleep() override;
  void sleep(Nanoseconds at_most) override;
  void cancel_sleep() override;
  void wake() override;
  void set_waker(std::function<void()> waker) override;
  bool shares_cpu_with(int /*peer*/) override { return false; }

  PeerState peer_state(int peer) override;
  std::string death_reason(int peer) override;
  std::optional<std::string> peer_abort() override;
  void send_abort(const std::string& reason) override;
  void leave() override;

 private:
  Session& session(int peer) { return *sessions_[static_cast<size_t>(peer)]; }
  template <typename Function>
  void for_each(const Function& function);

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Board> board_;
  std::vector<std::shared_ptr<Session>> sessions_;  // by rank
};

class TcpConnector final : public Connector {
 public:
  // `socket_buffer`: bytes of each connection's send buffer; 0 leaves it to the kernel.
  // With a small one most writes are short.
  explicit TcpConnector(int socket_buffer = 0);
  ~TcpConnector() override;

  const char* name() const override { return "tcp"; }
  std::string describe(const Config& config) override;
  std::string why_not(const std::string& description, const std::string& other) override;
  std::unique_ptr<Transport> connect(const ConnectRequest& request) override;

  void before_fork() override;
  void after_fork_parent() override;
  void after_fork_child() override;

 private:
  std::shared_ptr<Engine> engine();

  const int socket_buffer_;
  std::mutex mutex_;  // a leaf but for the table's; guards the two below
  std::shared_ptr<Descriptors> table_;
  std::shared_ptr<Engine> engine_;  // made by the first describe()
};

}  // namespace pycoll::tcp
