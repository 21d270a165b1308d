// Shared memory between the processes of one host, to the contract of transport/transport.h.
//
// Every rank makes one segment (layout.h), passes its descriptor to each peer over the connection
// of their two processes (endpoints.h), and maps theirs. FIFOs and flags that a rank polls lie in
// its own segment.
#pragma once

#include <memory>
#include <vector>

#include "transport/shm/fifo.h"
#include "transport/shm/port.h"
#include "transport/shm/segment.h"
#include "transport/shm/shm_leases.h"
#include "transport/transport.h"

namespace pycoll::shm {

class ShmTransport final : public Transport, private Window {
 public:
  ShmTransport(const ConnectRequest& request, std::vector<SharedMapping> segments,
               std::unique_ptr<Port> port, ShmLeases::Parts leases);

  const char* name() const override { return "shm"; }
  SendEnd& sender(int peer, int channel) override;
  RecvEnd& receiver(int peer, int channel) override;
  // Only where this rank reads all others: a window is for all ranks or for none.
  Window* window() override { return reaches_all_ ? this : nullptr; }
  Leases* leases() override { return leases_ ? &*leases_ : nullptr; }

  void announce(const CallHeader& call) override;
  void announce_elsewhere(const CallHeader& call) override;
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

  PeerState peer_state(int peer) override { return port_->state(peer); }
  std::optional<std::string> peer_abort() override { return port_->peer_abort(); }
  void send_abort(const std::string& reason) override { port_->send_abort(reason); }
  void leave() override { port_->leave(); }

 private:
  std::byte* local(int lane, int parity) override { return buffer(rank_, lane, parity); }
  const std::byte* peer(int rank, int lane, int parity) override {
    return buffer(rank, lane, parity);
  }
  void arrive(int lane, Arrival arrival) override;
  Arrival arrival_of(int rank, int lane, Arrival mine) override;
  void expect_write(int lane, int parity, size_t bytes) override;

  std::byte* buffer(int rank, int lane, int parity);
  std::atomic<uint64_t>& flag(int rank, int lane, Arrival arrival);
  void wake_peers();

  ControlBlock& control(int rank) const {
    return *reinterpret_cast<ControlBlock*>(segments_[static_cast<size_t>(rank)]->data());
  }

  int rank_;
  int world_size_;
  bool reaches_all_;
  Layout layout_;
  std::vector<SharedMapping> segments_;  // by rank; none of a peer that is reached another way
  std::vector<ShmSendEnd> senders_;      // [peer][channel]
  std::vector<ShmRecvEnd> receivers_;    // [peer][channel]
  std::unique_ptr<Port> port_;           // rings our doorbell until it is gone
  std::optional<ShmLeases> leases_;      // last: it asks the port who died
};

class ShmConnector final : public Connector {
 public:
  explicit ShmConnector(std::shared_ptr<SegmentMapper> mapper = std::make_shared<SegmentMapper>());
  ~ShmConnector() override;

  const char* name() const override { return "shm"; }
  std::string describe(const Config& config) override;
  std::string why_not(const std::string& description, const std::string& other) override;
  std::unique_ptr<Transport> connect(const ConnectRequest& request) override;

  void before_fork() override;
  void after_fork_parent() override;
  void after_fork_child() override;

 private:
  std::shared_ptr<Endpoints> endpoints();
  std::unique_ptr<Transport> meet(const ConnectRequest& request);

  std::shared_ptr<SegmentMapper> mapper_;
  ArenaMapper arenas_;
  std::mutex setup_;
  std::shared_ptr<Endpoints> endpoints_;  // made when first asked for; guarded by setup_
};

}  // namespace pycoll::shm
