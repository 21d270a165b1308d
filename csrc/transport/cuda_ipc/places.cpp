#include "transport/cuda_ipc/places.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace pycoll::cuda {
namespace {

constexpr size_t kSlots = kPlaceSlots;
constexpr size_t kAlign = 256;

constexpr size_t round_up(size_t x) {
  return (x + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

// In a rank's memory: what it offers; what peers have accepted of it, [peer][slot]; where it has
// mapped theirs, [peer][slot].
size_t Places::bytes_for(int world_size) {
  const size_t rows = round_up(static_cast<size_t>(world_size) * kSlots * sizeof(uint64_t));
  return round_up(kSlots * sizeof(Offer)) + 2 * rows;
}
Places::Offer* Places::offers_at(int rank) const {
  return reinterpret_cast<Offer*>(memory_[static_cast<size_t>(rank)]);
}
uint64_t* Places::accepted_at(int rank, int peer) const {
  std::byte* const rows = memory_[static_cast<size_t>(rank)] + round_up(kSlots * sizeof(Offer));
  return reinterpret_cast<uint64_t*>(rows) + index(peer, 0);
}
uint64_t* Places::table_at(int rank, int peer) const {
  const size_t rows = round_up(memory_.size() * kSlots * sizeof(uint64_t));
  std::byte* const table =
      memory_[static_cast<size_t>(rank)] + round_up(kSlots * sizeof(Offer)) + rows;
  return reinterpret_cast<uint64_t*>(table) + index(peer, 0);
}
size_t Places::index(int peer, int slot) const {
  return static_cast<size_t>(peer) * kSlots + static_cast<size_t>(slot);
}

// Of copies that are on their way: all as in memory, and for all peers.
struct Places::Pinned {
  Pinned(std::byte* at, size_t world)
      : own(reinterpret_cast<Offer*>(at)),
        offers(own + kSlots),
        accepted(reinterpret_cast<uint64_t*>(offers + world * kSlots)),
        accepting(accepted + world * kSlots),
        table(accepting + world * kSlots) {}
  static size_t bytes(size_t world) {
    return (1 + world) * kSlots * sizeof(Offer) + 3 * world * kSlots * sizeof(uint64_t);
  }
  Offer* own;           // out: what this rank offers
  Offer* offers;        // in: of peers
  uint64_t* accepted;   // in: by peers
  uint64_t* accepting;  // out: of peers' offers
  uint64_t* table;      // out
};

Places::Places(const Peers& peers, const Driver& driver, const std::function<std::byte*(int)>& at)
    : peers_(peers), driver_(driver) {
  const auto world = static_cast<size_t>(peers.world_size());
  for (int rank = 0; rank < peers.world_size(); ++rank) memory_.push_back(at(rank));
  mapped_.resize(world * kSlots);
  accepted_.resize(world * kSlots);
  to_publish_.resize(world);
  pinned_ = PinnedMemory(Pinned::bytes(world));
  std::memset(pinned_.data(), 0, pinned_.size());
}

uint64_t Places::check_of(const Offer& offer) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto add = [&](const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
      hash = (hash ^ static_cast<const uint8_t*>(from)[i]) * 1099511628211u;
    }
  };
  add(&offer.handle, sizeof(offer.handle));
  add(&offer.base, sizeof(offer.base));
  add(&offer.number, sizeof(offer.number));
  return hash;
}

template <class T>
void Places::copy(T* to, const T* from, size_t count) const {
  require(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, stream_.get()),
          "cudaMemcpyAsync");
}

Places::Own* Places::find(const Driver::Allocation& allocation) {
  for (Own& own : own_) {
    if (own.offer.number != 0 && own.allocation.base == allocation.base) return &own;
  }
  return nullptr;
}

void Places::withdraw(Own& own) {
  own = {};
  changed_ = true;
}

void Places::withdraw_freed() {
  for (Own& own : own_) {
    if (own.offer.number == 0) continue;
    const auto now = driver_.find_allocation(own.allocation.base);
    if (!now || now->identity != own.allocation.identity) withdraw(own);
  }
}

bool Places::accepted_by_all(const Own& own) const {
  const auto slot = static_cast<int>(&own - own_);
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    if (peer != peers_.rank && accepted_[index(peer, slot)] != own.offer.number) return false;
  }
  return true;
}

void Places::offer(const Driver::Allocation& allocation, bool idle) {
  const auto before = [](const Own& a, const Own& b) {
    const bool a_free = a.offer.number == 0, b_free = b.offer.number == 0;
    return a_free != b_free ? a_free : a.used < b.used;
  };
  Own& own = *std::min_element(std::begin(own_), std::end(own_), before);
  if (own.offer.number != 0) {
    if (!idle || own.captured || Clock::now() - own.used < kUnused) return;
    withdraw(own);
  }
  Offer offer;
  if (cudaIpcGetMemHandle(&offer.handle, allocation.base) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  offer.base = allocation.base;
  offer.number = ++last_number_;
  offer.check = check_of(offer);
  own = {allocation, offer, Clock::now(), false};
  changed_ = true;
}

uint64_t Places::word_for(const void* begin, uint64_t bytes, bool captured, bool idle) {
  const auto allocation = driver_.find_allocation(begin);
  if (!allocation || !allocation->can_be_shared) return 0;
  const auto offset =
      static_cast<uint64_t>(static_cast<const std::byte*>(begin) - allocation->base);
  if (offset + bytes > allocation->bytes) return 0;
  Own* own = find(*allocation);
  if (own != nullptr && own->allocation.identity != allocation->identity) {
    withdraw(*own);
    own = nullptr;
  }
  if (own == nullptr) {
    if (!captured) this->offer(*allocation, idle);
    return 0;
  }
  own->used = Clock::now();
  if (!accepted_by_all(*own)) return 0;
  own->captured |= captured;
  return place_word(static_cast<uint64_t>(own - own_), offset);
}

// False: it cannot be mapped; it is not tried again.
bool Places::map(int peer, int slot, const Offer& offer) {
  Mapped& mapped = mapped_[index(peer, slot)];
  mapped.import = {};
  mapped.number = offer.number;
  std::byte* base = offer.base;
  if (!peers_.in_this_process(peer)) {
    try {
      mapped.import = ImportedMemory(offer.handle);
    } catch (const Error&) {
      return false;  // freed meanwhile, say
    }
    base = mapped.import.base();
  }
  const Pinned pinned(pinned_.data(), memory_.size());
  pinned.table[index(peer, slot)] = reinterpret_cast<uintptr_t>(base);
  return true;
}

void Places::map_offers() {
  const Pinned pinned(pinned_.data(), memory_.size());
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    if (peer == peers_.rank) continue;
    for (int slot = 0; slot < kPlaceSlots; ++slot) {
      const size_t at = index(peer, slot);
      const Offer& offer = pinned.offers[at];
      accepted_[at] = pinned.accepted[at];
      if (offer.number == mapped_[at].number) continue;
      if (offer.number == 0) {
        mapped_[at] = {};
        pinned.accepting[at] = 0;
      } else if (offer.check == check_of(offer)) {
        pinned.accepting[at] = map(peer, slot, offer) ? offer.number : 0;
      } else {
        continue;  // half of it was read
      }
      to_publish_[static_cast<size_t>(peer)] = 1;
    }
  }
}

// A peer hears that its memory is mapped after the table says where.
void Places::publish() {
  const Pinned pinned(pinned_.data(), memory_.size());
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    if (to_publish_[static_cast<size_t>(peer)] == 0) continue;
    copy(table_at(peers_.rank, peer), pinned.table + index(peer, 0), kSlots);
    copy(accepted_at(peer, peers_.rank), pinned.accepting + index(peer, 0), kSlots);
    to_publish_[static_cast<size_t>(peer)] = 0;
  }
  if (!changed_) return;
  for (size_t slot = 0; slot < kSlots; ++slot) pinned.own[slot] = own_[slot].offer;
  copy(offers_at(peers_.rank), pinned.own, kSlots);
  changed_ = false;
}

void Places::ask() {
  const Pinned pinned(pinned_.data(), memory_.size());
  for (int peer = 0; peer < peers_.world_size(); ++peer) {
    if (peer == peers_.rank) continue;
    copy(pinned.offers + index(peer, 0), offers_at(peer), kSlots);
    copy(pinned.accepted + index(peer, 0), accepted_at(peers_.rank, peer), kSlots);
  }
  require(cudaEventRecord(arrived_.get(), stream_.get()), "cudaEventRecord");
  asked_ = true;
  asked_at_ = Clock::now();
}

void Places::progress() {
  // Pinned memory is in use until all has arrived.
  if (asked_ && arrived_.query() != cudaSuccess) return;
  if (asked_) map_offers();
  asked_ = false;
  if (Clock::now() - asked_at_ < kPeriod) return;
  withdraw_freed();
  publish();
  ask();
}

}  // namespace pycoll::cuda
