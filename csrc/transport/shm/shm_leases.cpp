#include "transport/shm/shm_leases.h"

#include <thread>

#include "core/clock.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/packet.h"

namespace pycoll::shm {
namespace {

constexpr uint64_t kGranted = uint64_t{1} << 32;
// A borrower looks at the lenders' words every few ten microseconds while it runs. One that takes
// longer is stopped, or its CPU is taken by others: its time is not ours.
constexpr Nanoseconds kPatience = std::chrono::milliseconds(100);

}  // namespace

ShmLeases::ShmLeases(int rank, std::vector<SharedMapping> segments, Parts parts, const Port& port)
    : rank_(static_cast<size_t>(rank)),
      segments_(std::move(segments)),
      parts_(std::move(parts)),
      port_(port),
      usable_(parts_.own != nullptr) {
  for (size_t peer = 0; peer < segments_.size(); ++peer) {
    usable_ = usable_ && (peer == rank_ || parts_.peers[peer] != nullptr);
    borrowers_.push_back({segments_[peer], port_.process(static_cast<int>(peer))});
  }
}

// The group ends here, and with it the news of who died.
ShmLeases::~ShmLeases() {
  for (size_t peer = 0; peer < segments_.size(); ++peer) {
    if (peer != rank_ && is_dead(peer)) parts_.quarantine.forget(segments_[peer]);
  }
  parts_.quarantine.sweep();
}

// Where a pidfd tells, the end of the connection does not: a process that closes all descriptors
// (to become a daemon, say) goes on writing.
bool ShmLeases::is_dead(size_t peer) const {
  const auto& process = borrowers_[peer].process;
  if (process != nullptr) return has_exited(*process);
  return port_.state(static_cast<int>(peer)) == PeerState::died;
}

std::optional<uint64_t> ShmLeases::offset_of(const std::byte* data, uint64_t bytes) {
  return usable_ ? parts_.own->offset_of(data, bytes) : std::nullopt;
}

void ShmLeases::offer(uint64_t sequence, const LeaseOffer& offer) {
  ControlBlock::Offer& mine = control(rank_).offer;
  // As with calls: a reader that sees any of the new words also sees this 0.
  mine.sequence.store(0, std::memory_order_relaxed);
  mine.terms.store(offer.fingerprint | (offer.granted ? kGranted : 0), std::memory_order_release);
  mine.input.store(offer.lease.input, std::memory_order_release);
  mine.output.store(offer.lease.output, std::memory_order_release);
  // Release: what the caller wrote to its vectors comes first.
  mine.sequence.store(sequence, std::memory_order_release);
  for (size_t peer = 0; peer < segments_.size(); ++peer) {
    if (peer != rank_) wake_if_sleeping(control(peer).sleeping);
  }
}

std::optional<LeaseOffer> ShmLeases::offer_of(int peer, uint64_t sequence) {
  const ControlBlock::Offer& theirs = control(static_cast<size_t>(peer)).offer;
  // Acquire: pairs with offer().
  const uint64_t seen = theirs.sequence.load(std::memory_order_acquire);
  if (seen > sequence) return LeaseOffer{};
  if (seen != sequence) return std::nullopt;
  LeaseOffer offer;
  const uint64_t terms = theirs.terms.load(std::memory_order_acquire);
  offer.fingerprint = static_cast<uint32_t>(terms);
  offer.granted = (terms & kGranted) != 0;
  offer.lease.input = theirs.input.load(std::memory_order_acquire);
  offer.lease.output = theirs.output.load(std::memory_order_acquire);
  // Overwritten meanwhile: the peer has gone on without a lease.
  if (theirs.sequence.load(std::memory_order_relaxed) != sequence) return LeaseOffer{};
  return offer;
}

std::byte* ShmLeases::address(int peer, uint64_t offset, uint64_t bytes) {
  return parts_.peers[static_cast<size_t>(peer)]->at(offset, bytes);
}

bool ShmLeases::enter() {
  control(rank_).borrowing.store(1, std::memory_order_relaxed);
  // Pairs with the fence in revoke().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!is_revoked()) return true;
  exit();
  return false;
}

bool ShmLeases::is_revoked() {
  // What was read of the peers' memory until now was read before these words.
  std::atomic_thread_fence(std::memory_order_acquire);
  for (size_t peer = 0; peer < segments_.size(); ++peer) {
    if (control(peer).revoked.load(std::memory_order_relaxed) != 0) return true;
  }
  return false;
}

void ShmLeases::exit() {
  // Release: all our accesses come before.
  control(rank_).borrowing.store(0, std::memory_order_release);
}

std::vector<int> ShmLeases::revokers() {
  std::vector<int> ranks;
  for (size_t peer = 0; peer < segments_.size(); ++peer) {
    if (peer != rank_ && control(peer).revoked.load(std::memory_order_relaxed) != 0) {
      ranks.push_back(static_cast<int>(peer));
    }
  }
  return ranks;
}

std::vector<size_t> ShmLeases::peers_inside() const {
  std::vector<size_t> inside;
  for (size_t peer = 0; peer < segments_.size(); ++peer) {
    if (peer == rank_ || borrowers_[peer].is_out() || is_dead(peer)) continue;
    inside.push_back(peer);
  }
  return inside;
}

void ShmLeases::wait_until_out() const {
  const Deadline deadline = Deadline::after(kPatience);
  while (!peers_inside().empty() && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void ShmLeases::revoke(const std::vector<LentRange>& written) {
  control(rank_).revoked.store(1, std::memory_order_relaxed);
  // Pairs with the fence in enter().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wait_until_out();
  std::vector<Borrower> borrowers;
  for (const size_t peer : peers_inside()) borrowers.push_back(borrowers_[peer]);
  if (borrowers.empty()) return;
  std::vector<uint64_t> tickets;
  for (const LentRange& range : written) {
    const auto offset = parts_.own->offset_of(range.data, range.bytes);
    if (offset) tickets.push_back(parts_.own->quarantine(*offset, range.bytes));
  }
  parts_.quarantine.add(parts_.own, std::move(tickets), std::move(borrowers));
}

}  // namespace pycoll::shm
