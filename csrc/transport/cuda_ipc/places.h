// Callers' vectors where they lie: which allocations of a rank all its peers have mapped.
//
// A rank *offers* an allocation that it was given a vector in: a handle, in its own memory. Peers
// look at offers now and then, map what is new, note where in a table of their own memory, and
// *accept* by writing the offer's number to the owner's. Once all have, the owner may tell kernels
// of peers, by a word, where in it a vector lies (PeerPlace in kernels/cuda/kernels.h). Until then,
// and where memory cannot be shared, it stages. So nobody waits for anybody, and ranks need not
// agree on who stages.
//
// An offer is withdrawn when its memory is found to have been freed (another identity), or makes
// room when it was not used for long and the group is idle: then no kernel of a peer uses it any
// more, because each call ends with a meeting of all ranks.
#pragma once

#include <functional>
#include <vector>

#include "core/clock.h"
#include "kernels/cuda/kernels.h"
#include "transport/cuda_ipc/regions.h"

namespace pycoll::cuda {

class Places {
 public:
  // Of memory that it needs in each rank's region, zero at first; at(r) is where rank r's begins.
  static size_t bytes_for(int world_size);
  Places(const Peers& peers, const Driver& driver, const std::function<std::byte*(int)>& at);
  // What is on its way has arrived.
  ~Places() { cudaStreamSynchronize(stream_.get()); }
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  // Looks at what peers offer and accept, as far as it is known. Never waits. Not during a capture.
  void progress();

  // Where peers find `bytes` from `begin` on; 0: they do not. May offer the memory for next time,
  // but not during a capture; `idle`: nothing of the group is under way.
  uint64_t word_for(const void* begin, uint64_t bytes, bool captured, bool idle);

  // The addresses of rank `peer`'s slots here, in device memory.
  const uint64_t* table_of(int peer) const { return table_at(peers_.rank, peer); }

 private:
  static constexpr Nanoseconds kPeriod = std::chrono::milliseconds(1);
  static constexpr Nanoseconds kUnused = std::chrono::seconds(2);

  // As it lies in memory. Read while it may be written: what does not add up is looked at again.
  struct Offer {
    cudaIpcMemHandle_t handle{};
    std::byte* base = nullptr;  // for ranks of the same process
    uint64_t number = 0;        // 0: nothing is offered
    uint64_t check = 0;
  };
  struct Own {
    Driver::Allocation allocation;
    Offer offer;
    Clock::time_point used{};
    bool captured = false;  // a graph may hold its place
  };
  struct Mapped {
    uint64_t number = 0;
    ImportedMemory import;
  };
  struct Pinned;

  static uint64_t check_of(const Offer& offer);
  Offer* offers_at(int rank) const;
  uint64_t* accepted_at(int rank, int peer) const;
  uint64_t* table_at(int rank, int peer) const;
  size_t index(int peer, int slot) const;

  Own* find(const Driver::Allocation& allocation);
  void offer(const Driver::Allocation& allocation, bool idle);
  void withdraw(Own& own);
  bool accepted_by_all(const Own& own) const;
  void withdraw_freed();
  void map_offers();
  bool map(int peer, int slot, const Offer& offer);
  void publish();
  void ask();
  template <class T>
  void copy(T* to, const T* from, size_t count) const;

  const Peers& peers_;
  const Driver& driver_;
  std::vector<std::byte*> memory_;
  Own own_[kPlaceSlots];
  uint64_t last_number_ = 0;
  bool changed_ = false;             // own_ has what is not published
  std::vector<Mapped> mapped_;       // [peer][slot]
  std::vector<uint64_t> accepted_;   // [peer][slot], by them
  std::vector<uint8_t> to_publish_;  // [peer]: its table has changed
  // Pinned: of copies that are on their way.
  PinnedMemory pinned_;
  Stream stream_;
  Event arrived_;
  bool asked_ = false;
  Clock::time_point asked_at_{};
};

}  // namespace pycoll::cuda
