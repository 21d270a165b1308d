// Several transports as one: each peer is reached by one of them, as the ranks agreed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace pycoll {

class MixedTransport final : public Transport {
 public:
  // `part_of_peer`: index into `parts` by rank, -1 for this rank. The first part sleeps for all: it
  // must wake by what its peers do as well as by wake(), which the others' threads call.
  MixedTransport(std::vector<std::unique_ptr<Transport>> parts, std::vector<int> part_of_peer);
  ~MixedTransport() override;

  const char* name() const override { return name_.c_str(); }
  SendEnd& sender(int peer, int channel) override { return to(peer).sender(peer, channel); }
  RecvEnd& receiver(int peer, int channel) override { return to(peer).receiver(peer, channel); }
  // No part has one: each reaches some of the peers only.
  Window* window() override { return nullptr; }

  void announce(const CallHeader& call) override;
  void announce_elsewhere(const CallHeader& call) override;
  std::optional<CallHeader> call_of(int peer, uint64_t sequence) override;
  std::optional<CallHeader> latest_call_of(int peer) override;
  void inquire() override;
  void say_ready(int stage) override;
  int ready_stage(int peer) override { return to(peer).ready_stage(peer); }

  void prepare_sleep() override;
  void sleep(Nanoseconds at_most) override;
  void cancel_sleep() override;
  void wake() override { parts_.front()->wake(); }
  bool shares_cpu_with(int peer) override { return to(peer).shares_cpu_with(peer); }

  PeerState peer_state(int peer) override { return to(peer).peer_state(peer); }
  std::string death_reason(int peer) override { return to(peer).death_reason(peer); }
  std::optional<std::string> peer_abort() override;
  void send_abort(const std::string& reason) override;
  void leave() override;

 private:
  Transport& to(int peer) const {
    return *parts_[static_cast<size_t>(part_of_peer_[static_cast<size_t>(peer)])];
  }

  std::vector<std::unique_ptr<Transport>> parts_;
  std::vector<int> part_of_peer_;
  std::string name_;  // "shm+tcp"
};

}  // namespace pycoll
