#include "transport/tcp/tcp_transport.h"

#include "transport/tcp/engine.h"

namespace pycoll::tcp {

TcpTransport::TcpTransport(std::shared_ptr<Engine> engine, std::shared_ptr<Board> board,
                           std::vector<std::shared_ptr<Session>> sessions)
    : engine_(std::move(engine)), board_(std::move(board)), sessions_(std::move(sessions)) {}

TcpTransport::~TcpTransport() {
  board_->set_waker(nullptr);
  engine_->release(sessions_);
}

template <typename Function>
void TcpTransport::for_each(const Function& function) {
  for (const auto& session : sessions_) {
    if (session) function(*session);
  }
}

SendEnd& TcpTransport::sender(int peer, int channel) {
  return session(peer).sender(channel);
}

RecvEnd& TcpTransport::receiver(int peer, int channel) {
  return session(peer).receiver(channel);
}

void TcpTransport::announce(const CallHeader& call) {
  board_->announce(call);
  for_each([](Session& each) { each.call_changed(); });
}

// The board first: a peer that asks from here on finds it there, and one that has asked before has
// shown its own call.
void TcpTransport::announce_elsewhere(const CallHeader& call) {
  const bool again = board_->announce_elsewhere(call);
  for_each([&](Session& each) { each.show_elsewhere(call, again); });
}

std::optional<CallHeader> TcpTransport::call_of(int peer, uint64_t sequence) {
  return session(peer).call_of(sequence);
}

std::optional<CallHeader> TcpTransport::latest_call_of(int peer) {
  return session(peer).latest_call();
}

void TcpTransport::inquire() {
  for_each([](Session& each) { each.inquire(); });
}

void TcpTransport::say_ready(int stage) {
  for_each([stage](Session& each) { each.say_ready(stage); });
}

int TcpTransport::ready_stage(int peer) {
  return session(peer).ready_stage();
}

void TcpTransport::prepare_sleep() {
  // A peer may wait for credits that are too few to be worth a frame while everything moves.
  for_each([](Session& each) { each.report_credits(); });
  board_->prepare_sleep();
}

void TcpTransport::sleep(Nanoseconds at_most) {
  // From here on the IO thread reads, and rings. What came since the last look makes it do so.
  for_each([](Session& each) { each.rearm(); });
  board_->sleep(at_most);
}

void TcpTransport::cancel_sleep() {
  board_->cancel_sleep();
}

void TcpTransport::wake() {
  board_->ring();
}

void TcpTransport::set_waker(std::function<void()> waker) {
  board_->set_waker(std::move(waker));
}

PeerState TcpTransport::peer_state(int peer) {
  return session(peer).state();
}

std::string TcpTransport::death_reason(int peer) {
  return session(peer).reason();
}

std::optional<std::string> TcpTransport::peer_abort() {
  return board_->peer_abort();
}

void TcpTransport::send_abort(const std::string& reason) {
  for_each([&](Session& each) { each.send_abort(reason); });
}

void TcpTransport::leave() {
  for_each([](Session& each) { each.leave(); });
}

}  // namespace pycoll::tcp
