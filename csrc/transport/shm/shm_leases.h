// Leases in shared memory: offers lie in the control blocks, what is lent in the arenas.
//
// A lender that fails and a borrower that begins look at each other's word like two sides of a
// doorbell: each stores its own, fences, and reads the other's. So either the borrower sees that
// the lease is revoked, or the lender sees that it is used. Model: models/lease.pml.
#pragma once

#include <memory>
#include <vector>

#include "transport/shm/layout.h"
#include "transport/shm/peer_arena.h"
#include "transport/shm/port.h"

namespace pycoll::shm {

class ShmLeases final : public Leases {
 public:
  struct Parts {
    std::shared_ptr<Arena> own;                           // or nullptr
    std::vector<std::shared_ptr<const PeerArena>> peers;  // by rank; nullptr: not mapped
    Quarantine& quarantine;
  };
  // `segments` of all ranks; the port outlives this.
  ShmLeases(int rank, std::vector<SharedMapping> segments, Parts parts, const Port& port);
  ~ShmLeases() override;

  std::optional<uint64_t> offset_of(const std::byte* data, uint64_t bytes) override;
  bool usable() override { return usable_; }
  void offer(uint64_t sequence, const LeaseOffer& offer) override;
  std::optional<LeaseOffer> offer_of(int peer, uint64_t sequence) override;
  std::byte* address(int peer, uint64_t offset, uint64_t bytes) override;

  bool enter() override;
  bool is_revoked() override;
  void exit() override;
  std::vector<int> revokers() override;
  void revoke(const std::vector<LentRange>& written) override;

 private:
  ControlBlock& control(size_t rank) const {
    return *reinterpret_cast<ControlBlock*>(segments_[rank]->data());
  }
  bool is_dead(size_t peer) const;
  std::vector<size_t> peers_inside() const;
  void wait_until_out() const;

  const size_t rank_;
  const std::vector<SharedMapping> segments_;
  const Parts parts_;
  const Port& port_;
  std::vector<Borrower> borrowers_;  // the peers, by rank
  bool usable_;
};

}  // namespace pycoll::shm
