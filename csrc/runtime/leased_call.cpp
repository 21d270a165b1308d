#include "runtime/leased_call.h"

#include "core/error.h"

namespace pycoll {

// Where all of a vector lies; its blocks must lie one behind the other, as peers take them to.
std::optional<uint64_t> LeasedCall::offset_of(const VectorView& view, size_t element) {
  if (view.blocks.empty()) return std::nullopt;
  const std::byte* end = view.blocks.front().data;
  for (const Block& block : view.blocks) {
    if (block.data != end) return std::nullopt;
    end += block.count * element;
  }
  return transport_.leases()->offset_of(view.blocks.front().data, view.count() * element);
}

bool LeasedCall::offer(const ExecutorInput& call, uint32_t fingerprint) {
  Leases* leases = transport_.leases();
  if (leases == nullptr) return false;
  call_ = call.call;
  fingerprint_ = fingerprint;
  world_size_ = call.program->world_size;
  offers_.assign(static_cast<size_t>(world_size_), std::nullopt);
  next_ = 0;
  stranger_.reset();

  const size_t element = size_of(call.call.dtype);
  LeaseOffer mine{fingerprint, leases->usable(), {}};
  const auto lend = [&](bool wanted, const VectorView& view, uint64_t& offset) {
    if (!wanted || !mine.granted) return;
    const auto found = offset_of(view, element);
    mine.granted = found.has_value();
    offset = found.value_or(Lease::kNothing);
  };
  lend(call.program->lends_input, call.input, mine.lease.input);
  lend(call.program->lends_output, call.output, mine.lease.output);
  if (!mine.granted) mine.lease = {};
  written_.clear();
  for (const Block& block :
       call.program->lends_output ? call.output.blocks : std::vector<Block>()) {
    written_.push_back({block.data, block.count * element});
  }
  offers_[static_cast<size_t>(rank_)] = mine;
  lending_ = mine.granted;
  leases->offer(call_.sequence, mine);
  return mine.granted;
}

LeasedCall::Verdict LeasedCall::look() {
  for (; next_ < world_size_; ++next_) {
    if (next_ == rank_) continue;
    auto& theirs = offers_[static_cast<size_t>(next_)];
    theirs = transport_.leases()->offer_of(next_, call_.sequence);
    if (!theirs) {
      // It may be in a call that has no leases.
      const auto announced = transport_.call_of(next_, call_.sequence);
      if (announced && pycoll::fingerprint(*announced) != fingerprint_) stranger_ = next_;
      return Verdict::pending;
    }
    // Who has refused is compared where data travels; who is past the call was.
    if (theirs->fingerprint != 0 && theirs->fingerprint != fingerprint_) {
      stranger_ = next_;
      return Verdict::pending;
    }
    if (!theirs->granted) {
      // Nobody has begun to use what this rank has offered, and nobody will.
      end();
      return Verdict::refused;
    }
  }
  return Verdict::granted;
}

std::vector<int> LeasedCall::missing() const {
  std::vector<int> ranks;
  for (int peer = next_; peer < world_size_; ++peer) {
    if (peer != rank_ && !transport_.leases()->offer_of(peer, call_.sequence)) {
      ranks.push_back(peer);
    }
  }
  return ranks;
}

std::byte* LeasedCall::vector_of(int peer, Space space, uint64_t bytes) const {
  const Lease& lease = offers_[static_cast<size_t>(peer)]->lease;
  const uint64_t offset = space == Space::input ? lease.input : lease.output;
  std::byte* data =
      offset == Lease::kNothing ? nullptr : transport_.leases()->address(peer, offset, bytes);
  if (data == nullptr) {
    fail(ErrorKind::mismatch, "rank ", rank_, ", ", to_string(call_), ": rank ", peer, " lends no ",
         name_of(space), " of ", bytes, " bytes: it does not run the same Program");
  }
  return data;
}

bool LeasedCall::enter() {
  if (!inside_) inside_ = transport_.leases()->enter();
  return inside_;
}

void LeasedCall::exit() {
  if (inside_) transport_.leases()->exit();
  inside_ = false;
}

bool LeasedCall::is_valid() {
  if (!transport_.leases()->is_revoked()) return true;
  exit();
  return false;
}

std::vector<int> LeasedCall::revokers() const {
  return transport_.leases()->revokers();
}

void LeasedCall::give_up() {
  exit();
  if (lending_) transport_.leases()->revoke(written_);
  lending_ = false;
}

}  // namespace pycoll
