// One call's leases, on one rank: the exchange that it begins with, and the use of peers' vectors.
//
// Every rank offers before it waits for anybody. One that has nothing to lend (its tensors are not
// in shareable memory, say) knows at once that nobody will use leases, and goes on without them;
// the others see that when they look. All come to the same verdict: with a lease from everybody no
// rank can leave the call before all have come to its barrier. The offers carry fingerprints, so
// ranks that disagree find out before anything of a peer's is touched. Model: models/lease.pml.
#pragma once

#include <optional>
#include <vector>

#include "runtime/executor_input.h"
#include "transport/transport.h"

namespace pycoll {

class LeasedCall {
 public:
  enum class Verdict { pending, granted, refused };

  LeasedCall(Transport& transport, int rank) : transport_(transport), rank_(rank) {}

  // Offers what this rank's Program lends. False: it has none to give, so that the verdict is
  // `refused` already.
  bool offer(const ExecutorInput& call, uint32_t fingerprint);
  // Looks for the peers' offers.
  Verdict look();
  // A peer that is seen to be in another call: its offer, or what it announced, differs.
  std::optional<int> stranger() const { return stranger_; }
  // The peers whose offers have not come.
  std::vector<int> missing() const;

  // A peer's vector. Throws Error(mismatch) when the peer lends none of that size.
  std::byte* vector_of(int peer, Space space, uint64_t bytes) const;

  // Brackets every use of peers' vectors; both may be called again. enter() is false when a peer
  // has failed: nothing may be used then.
  bool enter();
  void exit();
  // To be asked after every portion: false when what was read may be nonsense.
  bool is_valid();
  std::vector<int> revokers() const;

  bool inside() const { return inside_; }

  // The call ended well, or badly: then the lease is taken back (Leases::revoke), which may take a
  // moment.
  void end() { lending_ = false; }
  void give_up();

 private:
  std::optional<uint64_t> offset_of(const VectorView& view, size_t element);

  Transport& transport_;
  const int rank_;
  CallHeader call_;
  uint32_t fingerprint_ = 0;
  int world_size_ = 1;
  bool lending_ = false;  // this rank's offer stands
  bool inside_ = false;
  std::vector<std::optional<LeaseOffer>> offers_;  // by rank
  int next_ = 0;                                   // the first peer whose offer is not known
  std::optional<int> stranger_;
  std::vector<LentRange> written_;  // what peers may write
};

}  // namespace pycoll
