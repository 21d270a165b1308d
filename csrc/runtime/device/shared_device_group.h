// Ranks that share a GPU, and any others of a host whose GPUs reach each other's memory: nothing
// on the device waits for a peer but streams, for words in memory.
//
// Each rank has a *staging* area that all map. A collective is done in rounds: every rank copies
// its part in; all meet; each reads what it needs of all ranks' staging (one kernel reads all and
// writes all that is its work); all meet again. Large vectors are not copied, but read and written
// where they lie, as soon as all ranks have mapped their memory (transport/cuda_ipc/places.h).
// Messages and all_to_all go through *mailboxes*, one a pair of ranks and direction, in the
// sender's memory.
//
// Words are toggled, never counted, so graphs may be replayed: who arrives writes 1 into a word of
// each peer, who waits for it makes it 0 again. A rank cannot arrive twice before a peer has made
// its word 0, because the two kinds of meetings alternate; model: models/device_phases.pml.
//
// Before they meet, ranks write what they are in (call_word.h); kernels compare it, and do nothing
// where it differs.
#pragma once

#include "kernels/cuda/kernels.h"
#include "runtime/device/cuda_group.h"
#include "transport/cuda_ipc/places.h"

namespace pycoll::cuda {

class SharedDeviceGroup final : public CudaGroup {
 public:
  explicit SharedDeviceGroup(GroupSeed seed);
  ~SharedDeviceGroup() override { finish(); }
  void connect() override;

  const char* path() const override { return "shared_device"; }

 protected:
  void launch(const CallRequest& request, cudaStream_t stream) override;
  void launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) override;
  std::optional<Error> reported() override;
  std::string why_late() const override;
  void disarm() override;
  void release_waits() override;

 private:
  // Words of a rank's region: row `Word`, one a peer, which is who makes it 1.
  enum class Word : uint8_t {
    ready,  // the peer's part of the round is in its staging
    done,   // the peer has read what it needed of this round
    full,   // there is something in the mailbox from the peer
    empty,  // the peer has read what is in this rank's mailbox for it
    kCount,
  };
  struct Round;
  // Of this rank's vectors: where peers find them, as PeerPlace has it; 0: in the staging area.
  struct Placed {
    uint64_t input = 0;
    uint64_t output = 0;
  };
  // Words of a rank for its peers: places, and what it is in.
  enum class Side : uint8_t { input, output, call };

  uint32_t* word_of(int holder, Word row, int peer) const;
  std::byte* staging_of(int peer) const { return payload_of(peer) + staging_at_; }
  std::byte* mailbox_of(int from, int to) const;

  uint64_t* place_of(int holder, Side side) const;
  uint32_t* given_up() const;
  // What is in the mailbox from one rank to another, in the sender's memory.
  uint64_t* letter_of(int from, int to) const;

  // Every rank has come so far. `first`: what peers read after that.
  void meet(Word row, cudaStream_t stream, std::vector<WordOperation> first = {}) const;
  Agreement agreement_on(uint64_t word) const;

  bool may_be_placed(const Round& round) const;
  Placed place(const CallRequest& request, const Round& round);
  uint64_t find_place(const VectorView& view, uint64_t element, bool idle);
  PeerPlace peer_place(int peer, Side side, const Round& round, uint64_t slot,
                       uint64_t before) const;
  std::byte* own_input(const CallRequest& request, const Round& round, size_t slot) const;
  void run_round(const CallRequest& request, const Round& round, cudaStream_t stream) const;
  void copy_in(const CallRequest& request, const Round& round, cudaStream_t stream) const;
  void reduce(const CallRequest& request, const Round& round, cudaStream_t stream) const;
  void pull(const CallRequest& request, const Round& round, cudaStream_t stream) const;
  void copy_out(const CallRequest& request, const Round& round, cudaStream_t stream) const;
  bool sums_by_parts(const CallRequest& request, const Round& round) const;
  Round first_round(const CallRequest& request) const;

  void all_to_all(const CallRequest& request, cudaStream_t stream) const;
  // What goes from and to each peer, in order: all that both sides know alike.
  struct Mail {
    std::vector<std::vector<Block>> to;  // bytes
    std::vector<std::vector<Block>> from;
    Collective kind;
    OverCodec over{};
  };
  struct Parcel {
    int peer;
    Block block;
    uint64_t letter;  // of the whole message
  };
  void exchange(const Mail& mail, cudaStream_t stream) const;
  // Part `round` of what goes to each peer, or comes from there; none where there are no more.
  std::vector<Parcel> parcels_of(const Mail& mail, bool coming, size_t round) const;
  void post(const std::vector<Parcel>& parcels, cudaStream_t stream) const;
  void collect(const std::vector<Parcel>& parcels, cudaStream_t stream) const;

  const Driver driver_;
  const size_t staging_bytes_;
  const size_t mailbox_bytes_;
  const size_t places_at_;  // in the payload of a region
  const size_t staging_at_;
  PinnedMemory ones_;     // words that all wait for
  PinnedMemory differs_;  // [kMaxRanks], of Agreement
  PinnedMemory calls_;    // [kMaxRanks], of why_late()
  const Stream rescue_;   // of release_waits()
  std::unique_ptr<Places> places_;
};

}  // namespace pycoll::cuda
