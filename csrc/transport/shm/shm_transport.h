// Shared memory between the processes of one host, to the contract of transport/transport.h.
//
// Every rank makes one segment (layout.h), passes its descriptor to each peer over an abstract unix
// socket, and maps theirs. FIFOs and flags that a rank polls lie in its own segment.
#pragma once

#include <memory>
#include <vector>

#include "transport/shm/fifo.h"
#include "transport/shm/link.h"
#include "transport/shm/peer_watch.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace pycoll::shm {

class ShmTransport final : public Transport, private Window {
 public:
  ShmTransport(const ConnectRequest& request, std::vector<SharedMapping> segments,
               std::vector<Link> links);

  const char* name() const override { return "shm"; }
  SendEnd& sender(int peer, int channel) override;
  RecvEnd& receiver(int peer, int channel) override;
  Window* window() override { return this; }

  void announce(const CallHeader& call) override;
  std::optional<CallHeader> call_of(int peer, uint64_t sequence) override;
  std::optional<CallHeader> latest_call_of(int peer) override;
  void inquire() override {}  // every call lies in shared memory

  void say_ready(int stage) override;
  int ready_stage(int peer) override;

  void prepare_sleep() override;
  void sleep(Nanoseconds at_most) override;
  void cancel_sleep() override;
  void wake() override;
  bool shares_cpu_with(int peer) override;

  PeerState peer_state(int peer) override { return watch_->state(peer); }
  std::optional<std::string> peer_abort() override { return watch_->peer_abort(); }
  void send_abort(const std::string& reason) override { watch_->send_abort(reason); }
  void leave() override { watch_->leave(); }

 private:
  std::byte* local(int lane, int parity) override;
  const std::byte* peer(int rank, int lane, int parity) override;
  void arrive(int lane, Arrival arrival) override;
  Arrival arrival_of(int rank, int lane) override;

  void wake_peers();

  ControlBlock& control(int rank) const {
    return *reinterpret_cast<ControlBlock*>(segments_[static_cast<size_t>(rank)]->data());
  }

  int rank_;
  int world_size_;
  Layout layout_;
  std::vector<SharedMapping> segments_;
  std::vector<ShmSendEnd> senders_;    // [peer][channel]
  std::vector<ShmRecvEnd> receivers_;  // [peer][channel]
  std::unique_ptr<PeerWatch> watch_;   // last: its thread rings our doorbell until it is joined
};

class ShmConnector final : public Connector {
 public:
  explicit ShmConnector(std::shared_ptr<SegmentMapper> mapper = std::make_shared<SegmentMapper>());

  const char* name() const override { return "shm"; }
  std::string describe(const Config& config) override;
  std::string why_not(const std::string& description, const std::string& other) override;
  std::unique_ptr<Transport> connect(const ConnectRequest& request) override;

 private:
  struct Mesh;  // what has been connected so far

  std::shared_ptr<SegmentMapper> mapper_;
  std::unique_ptr<Listener> listener_;
};

// Shared memory and abstract sockets reach every process with the same boot and network namespace.
std::string host_identity();

// What keeps this process from using shared memory at all; empty when nothing does. Tries it for
// real.
std::string why_unavailable();

}  // namespace pycoll::shm
