#include "transport/shm/shm_transport.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace pycoll::shm {
namespace {

template <typename End>
std::vector<End> make_ends(int world_size, const std::function<FifoPlace(int, int)>& place) {
  std::vector<End> ends;
  for (int peer = 0; peer < world_size; ++peer) {
    for (int channel = 0; channel < kFifoChannels; ++channel)
      ends.emplace_back(place(peer, channel));
  }
  return ends;
}

// Asks for a line as a store does, without waiting for it.
void prefetch_to_write(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

void show(ControlBlock::Calls& calls, const CallHeader& call) {
  CallSlot& slot = calls.slots[call.sequence % kCallSlots];
  uint64_t words[sizeof(CallHeader) / 8];
  std::memcpy(words, &call, sizeof(call));
  // A reader that sees any of the words below also sees this 0, because each is stored with release
  // and loaded with acquire: it then knows that what it read may be torn.
  slot.sequence.store(0, std::memory_order_relaxed);
  for (size_t i = 0; i < std::size(words); ++i) {
    slot.words[i].store(words[i], std::memory_order_release);
  }
  slot.sequence.store(call.sequence, std::memory_order_release);
  calls.latest.store(call.sequence, std::memory_order_release);
}

std::optional<CallHeader> find(const ControlBlock::Calls& calls, uint64_t sequence) {
  const CallSlot& slot = calls.slots[sequence % kCallSlots];
  if (slot.sequence.load(std::memory_order_acquire) != sequence) return std::nullopt;
  uint64_t words[sizeof(CallHeader) / 8];
  for (size_t i = 0; i < std::size(words); ++i) {
    words[i] = slot.words[i].load(std::memory_order_acquire);
  }
  // Still the same: none of the words was of a later call.
  if (slot.sequence.load(std::memory_order_relaxed) != sequence) return std::nullopt;
  CallHeader call;
  std::memcpy(static_cast<void*>(&call), words, sizeof(call));
  return call;
}

}  // namespace

ShmTransport::ShmTransport(const ConnectRequest& request, std::vector<SharedMapping> segments,
                           std::unique_ptr<Port> port, ShmLeases::Parts leases)
    : rank_(request.rank),
      world_size_(request.world_size),
      layout_(request.world_size, request.geometry),
      segments_(std::move(segments)),
      port_(std::move(port)) {
  const auto reached = [](const SharedMapping& segment) { return segment != nullptr; };
  reaches_all_ = std::all_of(segments_.begin(), segments_.end(), reached);
  const auto place = [this](int receiver, int sender, int channel, int other) {
    if (!segments_[static_cast<size_t>(other)]) return FifoPlace{};
    return FifoPlace{segments_[static_cast<size_t>(receiver)]->data(), &layout_, sender, channel,
                     &control(other).sleeping};
  };
  senders_ = make_ends<ShmSendEnd>(
      world_size_, [&](int peer, int channel) { return place(peer, rank_, channel, peer); });
  receivers_ = make_ends<ShmRecvEnd>(
      world_size_, [&](int peer, int channel) { return place(rank_, peer, channel, peer); });
  if (reaches_all_) leases_.emplace(rank_, segments_, std::move(leases), *port_);
  port_->on_news([this] { wake(); });
}

SendEnd& ShmTransport::sender(int peer, int channel) {
  return senders_[static_cast<size_t>(peer * kFifoChannels + channel)];
}

RecvEnd& ShmTransport::receiver(int peer, int channel) {
  return receivers_[static_cast<size_t>(peer * kFifoChannels + channel)];
}

void ShmTransport::announce(const CallHeader& call) {
  ControlBlock& mine = control(rank_);
  mine.cpu.store(static_cast<uint32_t>(::sched_getcpu() + 1), std::memory_order_relaxed);
  show(mine.calls, call);
}

void ShmTransport::announce_elsewhere(const CallHeader& call) {
  show(control(rank_).elsewhere, call);
  wake_peers();
}

std::optional<CallHeader> ShmTransport::call_of(int peer, uint64_t sequence) {
  const ControlBlock& theirs = control(peer);
  const auto call = find(theirs.calls, sequence);
  return call ? call : find(theirs.elsewhere, sequence);
}

std::optional<CallHeader> ShmTransport::latest_call_of(int peer) {
  const ControlBlock& theirs = control(peer);
  const uint64_t sequence = std::max(theirs.calls.latest.load(std::memory_order_acquire),
                                     theirs.elsewhere.latest.load(std::memory_order_acquire));
  if (sequence == 0) return std::nullopt;
  return call_of(peer, sequence);
}

void ShmTransport::say_ready(int stage) {
  // Release: whatever this rank did before.
  control(rank_).ready_stage.store(stage, std::memory_order_release);
  wake_peers();
}

int ShmTransport::ready_stage(int peer) {
  return control(peer).ready_stage.load(std::memory_order_acquire);  // pairs with say_ready()
}

void ShmTransport::wake_peers() {
  for (int peer = 0; peer < world_size_; ++peer) {
    const bool reached = segments_[static_cast<size_t>(peer)] != nullptr;
    if (peer != rank_ && reached) wake_if_sleeping(control(peer).sleeping);
  }
}

void ShmTransport::prepare_sleep() {
  shm::prepare_sleep(control(rank_).sleeping);
}
void ShmTransport::sleep(Nanoseconds at_most) {
  shm::sleep(control(rank_).sleeping, at_most);
}
void ShmTransport::cancel_sleep() {
  shm::cancel_sleep(control(rank_).sleeping);
}
void ShmTransport::wake() {
  wake_if_sleeping(control(rank_).sleeping);
}

bool ShmTransport::shares_cpu_with(int peer) {
  const auto here = static_cast<uint32_t>(::sched_getcpu() + 1);
  ControlBlock& mine = control(rank_);
  mine.cpu.store(here, std::memory_order_relaxed);
  return here != 0 && control(peer).cpu.load(std::memory_order_relaxed) == here;
}

std::byte* ShmTransport::buffer(int rank, int lane, int parity) {
  if (lane == kCellLane) return control(rank).cells[parity].payload;
  return segments_[static_cast<size_t>(rank)]->data() + layout_.window(lane, parity);
}

std::atomic<uint64_t>& ShmTransport::flag(int rank, int lane, Arrival arrival) {
  if (lane == kCellLane) return control(rank).cells[arrival.parity()].arrival;
  return control(rank).arrivals[lane].word;
}

void ShmTransport::expect_write(int lane, int parity, size_t bytes) {
  // More than a few would only push each other out of the buffers that wait for lines.
  constexpr size_t kMost = 12 * kLine;
  const std::byte* begin = buffer(rank_, lane, parity);
  const std::byte* end = begin + std::min(bytes, kMost);
  // The buffer of the cell does not begin with a line.
  begin -= reinterpret_cast<uintptr_t>(begin) % kLine;
  for (; begin < end; begin += kLine) prefetch_to_write(begin);
}

void ShmTransport::arrive(int lane, Arrival arrival) {
  // Release: what was written to the window, and our reads of the peers' windows, come first.
  flag(rank_, lane, arrival).store(arrival.word(), std::memory_order_release);
  wake_peers();
}

Arrival ShmTransport::arrival_of(int rank, int lane, Arrival mine) {
  // Acquire: pairs with arrive().
  return Arrival(flag(rank, lane, mine).load(std::memory_order_acquire));
}

}  // namespace pycoll::shm
