// The transport contract.
//
// A transport moves bytes between the ranks of one group. It knows nothing of algorithms, dtypes or
// reductions. What it offers:
//
//   * FIFOs, one per (sender, receiver, channel), `depth` messages deep. The sender acquires a
//     slot, fills it in place and publishes it; the receiver peeks at the oldest message in place
//     and releases it, which gives the slot back. Neither ever waits: "not now" is a normal answer,
//     and the caller (the executor) tries again or sleeps.
//   * A window (optional): memory of each rank that all others can read, and arrival flags that
//     order its use. A small part of it, the cell, lies in the cache line of its own flag.
//   * Leases (optional): peers' own vectors, where they lie in memory that all ranks map.
//   * The current call of every rank, as far as it is known: a mismatch can be described and a
//     stuck rank named.
//   * Sleeping until something may have changed, and being woken by who publishes, releases or
//     arrives.
//   * News of peers: left in good order, died, aborted the group.
//
// Rules for implementations
//   * All methods are called by one thread at a time (the communicator sees to it), except wake(),
//     send_abort(), peer_state(), peer_abort(), call_of() and latest_call_of(), which any thread
//     may call, and announce_elsewhere(), which one thread at a time calls beside that one.
//   * What was written before publish()/release()/arrive() is visible to whoever sees its effect.
//   * No missed wake-up: after prepare_sleep(), anything that a peer publishes either is seen by
//     the caller's next look or ends sleep().
//   * Nobody reads or writes a peer's user memory but under a lease for that very call, while it
//     has said so (Leases::enter), and not after the lender has seen it leave, or has taken the
//     lease back and put what it lent aside.
//   * Whatever a peer writes may be garbage: sizes and indexes are checked before use.
//
// A new transport is a folder with the same file names: see docs/architecture.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/config.h"
#include "program/program.h"
#include "transport/call.h"

namespace pycoll {

// FIFOs of a pair of ranks in each direction: those of Programs, and one for point-to-point.
constexpr int kMessageChannel = kMaxChannels;
constexpr int kFifoChannels = kMaxChannels + 1;

// Travels with every message.
struct MessageTag {
  uint32_t fingerprint = 0;  // of the operation it belongs to
  uint32_t bytes = 0;
  Wire wire = Wire::value;
  bool operator==(const MessageTag&) const = default;
};

struct Message {
  const std::byte* data = nullptr;
  MessageTag tag;
};

class SendEnd {
 public:
  virtual ~SendEnd() = default;
  // Room for one message, or nullptr when the FIFO is full. The same room until publish().
  virtual std::byte* acquire() = 0;
  virtual void publish(const MessageTag& tag) = 0;
  // Instead of filling the room that acquire() has just found: a message whose payload lies
  // elsewhere, and must not change before sent() says that it has been read.
  virtual void send(const MessageTag& tag, const std::byte* payload) {
    std::memcpy(acquire(), payload, tag.bytes);
    publish(tag);
  }
  virtual bool sent() { return true; }
  // Only for a group that is given up: when it returns, the payload is not read any more.
  virtual void recall() {}
};

class RecvEnd {
 public:
  virtual ~RecvEnd() = default;
  // The oldest message, or nothing. The same one until release().
  virtual std::optional<Message> peek() = 0;
  virtual void release() = 0;
  // A hint: the payload of the next message, or of the one that comes `later` messages after it,
  // may be put to `to` if its tag is this one; peek() then gives that address. Until that message
  // has been seen or withdraw() returns, the transport may write there.
  virtual void offer(std::byte* /*to*/, const MessageTag& /*tag*/, uint32_t /*later*/) {}
  // Only for a group that is given up: messages that are on their way may be lost.
  virtual void withdraw() {}
};

// An arrival at a barrier, as one 64-bit word, so that the flag and what it vouches for cannot be
// seen apart: | ordinal 40 | fingerprint 24 |. `ordinal` counts the barriers of this lane since the
// group was made, from 1. It only grows, and ranks are never two apart, so the wrapped difference
// tells who is ahead.
class Arrival {
 public:
  Arrival() = default;
  explicit Arrival(uint64_t word) : word_(word) {}
  Arrival(uint64_t ordinal, uint32_t fingerprint)
      : word_(ordinal << 24 | (fingerprint & 0xFFFFFFu)) {}

  uint64_t word() const { return word_; }
  // Which of the two buffers of the cell its barrier is about.
  int parity() const { return static_cast<int>((word_ >> 24) & 1); }
  // True when a rank whose flag shows *this has come to `other`.
  bool reached(Arrival other) const {
    return static_cast<int64_t>((word_ & kOrdinal) - (other.word_ & kOrdinal)) >= 0;
  }
  bool same_barrier(Arrival other) const { return word_ >> 24 == other.word_ >> 24; }
  bool same_fingerprint(Arrival other) const {
    return (word_ & 0xFFFFFFu) == (other.word_ & 0xFFFFFFu);
  }

 private:
  static constexpr uint64_t kOrdinal = ~uint64_t{0xFFFFFF};
  uint64_t word_ = 0;
};

// The *cell* is the buffer of operations on a few elements: flag and payload lie side by side, so
// that a peer takes both with one cache line. It counts as one more lane, of Programs that meet
// once of one round and one barrier, whose ordinal and parity alternate together.
constexpr int kCellLane = kMaxLanes;
constexpr int kWindowLanes = kMaxLanes + 1;
constexpr uint64_t kCellBytes = 16 << 10;

class Window {
 public:
  virtual ~Window() = default;
  // This rank's buffer, and a peer's. `parity` selects one of the two that alternate. Those of the
  // cell have kCellBytes and are aligned to 8 bytes.
  virtual std::byte* local(int lane, int parity) = 0;
  virtual const std::byte* peer(int rank, int lane, int parity) = 0;
  // This rank will write so many bytes of that buffer before long, and its peers have read it: a
  // hint, to get hold of its cache lines meanwhile.
  virtual void expect_write(int /*lane*/, int /*parity*/, size_t /*bytes*/) {}
  // Says that this rank has come to a barrier; wakes the peers.
  virtual void arrive(int lane, Arrival arrival) = 0;
  // The last arrival of a peer; in the cell the last at a barrier of the parity of `mine`.
  virtual Arrival arrival_of(int rank, int lane, Arrival mine) = 0;
};

// What a rank lends its peers for one call: where its vectors lie, as offsets into memory of its
// own that they map.
struct Lease {
  static constexpr uint64_t kNothing = ~uint64_t{0};
  uint64_t input = kNothing;
  uint64_t output = kNothing;
};

// A rank's word on a call: its fingerprint, and the lease, or that it has none to give: then no
// rank uses any. One that needs to lend nothing gives an empty one.
struct LeaseOffer {
  uint32_t fingerprint = 0;
  bool granted = false;
  Lease lease;
};

// Part of a caller's vector that is lent.
struct LentRange {
  const std::byte* data = nullptr;
  uint64_t bytes = 0;
};

// Leases of a group. Each call that uses them begins with an offer of every rank, which all others
// look at (runtime/leased_call.h), and ends with a barrier.
class Leases {
 public:
  virtual ~Leases() = default;
  // Where a range lies in the memory that peers map; nothing when it does not, or when some peer
  // and this rank do not map each other's.
  virtual std::optional<uint64_t> offset_of(const std::byte* data, uint64_t bytes) = 0;
  // False: this rank cannot take part in any lease.
  virtual bool usable() = 0;
  // What was written to the vectors before is visible to whoever sees the offer; wakes the peers.
  virtual void offer(uint64_t sequence, const LeaseOffer& offer) = 0;
  // Nothing: it has made none for that call yet. A rank that is past the call has refused: with a
  // lease it would have waited for this rank's part.
  virtual std::optional<LeaseOffer> offer_of(int peer, uint64_t sequence) = 0;
  // The memory behind a lease, or nullptr when it is not all in what the peer shares.
  virtual std::byte* address(int peer, uint64_t offset, uint64_t bytes) = 0;

  // Around all use of peers' memory. enter() is false when a peer has taken its lease back: then
  // nothing may be touched. So does is_revoked() say, to be asked again and again meanwhile, and
  // last before anyone is told that this rank is through: what was read may be nonsense.
  virtual bool enter() = 0;
  virtual bool is_revoked() = 0;
  virtual void exit() = 0;
  // The peers that have taken theirs back.
  virtual std::vector<int> revokers() = 0;

  // After a failure: takes back what this rank has lent in the call. Waits a moment for the peers
  // that use it; what one of them may still write then (`written`) is not given to anyone else
  // before that peer has said that it is out, or has died.
  virtual void revoke(const std::vector<LentRange>& written) = 0;
};

enum class PeerState : uint8_t { alive, left, died };

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;

  virtual SendEnd& sender(int peer, int channel) = 0;
  virtual RecvEnd& receiver(int peer, int channel) = 0;
  virtual Window* window() = 0;                 // nullptr when peers' memory cannot be read
  virtual Leases* leases() { return nullptr; }  // only where there is a window

  // Makes this rank's current call known to all.
  virtual void announce(const CallHeader& call) = 0;
  // Makes known one that is carried out by groups of its own, and wakes the peers: they may be in
  // another call of that number, and would wait. Again with the same number: what has become of it.
  virtual void announce_elsewhere(const CallHeader& call) = 0;
  // The peer's call with that sequence number, if it is known; and the newest that is known.
  virtual std::optional<CallHeader> call_of(int peer, uint64_t sequence) = 0;
  virtual std::optional<CallHeader> latest_call_of(int peer) = 0;
  // Called when an operation has waited for a while: asks the peers for their current calls, where
  // they are not known anyway, and shows them this rank's. Answers come like messages do.
  virtual void inquire() = 0;

  // While the group connects: this rank has come to stage `stage` (1, 2, ...); the stage that a
  // peer has come to. Nothing else orders the ranks then.
  virtual void say_ready(int stage) = 0;
  virtual int ready_stage(int peer) = 0;

  // prepare_sleep(); look once more; then sleep() or cancel_sleep().
  virtual void prepare_sleep() = 0;
  virtual void sleep(Nanoseconds at_most) = 0;
  virtual void cancel_sleep() = 0;
  virtual void wake() = 0;
  // When this transport is a part of a mixed one, its threads call `waker` wherever they would end
  // sleep(), because another part sleeps for all. Given once, before the transport is used.
  virtual void set_waker(std::function<void()> /*waker*/) {}

  // The peer runs on the CPU that this thread runs on (a hint; false when unknown).
  virtual bool shares_cpu_with(int peer) = 0;

  virtual PeerState peer_state(int peer) = 0;
  // How it is known that a peer died; empty when there is nothing to say but that it did.
  virtual std::string death_reason(int /*peer*/) { return ""; }
  // The reason in the first abort that a peer sent, if any.
  virtual std::optional<std::string> peer_abort() = 0;
  // Tells all peers why this rank gives the group up. Best effort, never blocks.
  virtual void send_abort(const std::string& reason) = 0;
  // Tells all peers that this rank leaves in good order. Idempotent.
  virtual void leave() = 0;
};

// What a transport needs of the configuration: the same on all ranks.
struct TransportGeometry {
  uint64_t slot_bytes = 0;
  uint32_t fifo_depth = 0;
  uint64_t window_bytes = 0;
};

struct ConnectRequest {
  int rank = 0;
  int world_size = 1;
  std::string job_key;  // random, from rank 0: the group's name on shared endpoints
  std::vector<std::string> descriptions;  // of every rank, as this connector made them
  // The ranks that this transport reaches for this one; never this rank itself. Symmetric: all
  // ranks computed it from the same descriptions. Groups that span hosts use several transports.
  std::vector<bool> serves;
  TransportGeometry geometry;
  Deadline deadline = Deadline::after(std::chrono::seconds(60));
  std::function<void()> interrupt;  // called now and then while waiting; may throw
};

// One process's way to its peers, for all of its groups: they share what connects two processes,
// and it goes with the last transport that uses it. `describe()` is published through the store;
// then every rank sees all descriptions and decides viability from the same data.
//
// Any thread may call these, several at once. connect() returns when this rank has reached the
// peers that it serves; that they have all reached theirs is asked through Transport::say_ready().
class Connector {
 public:
  virtual ~Connector() = default;
  virtual const char* name() const = 0;
  // What peers need to reach this process: one line of text, which names the transport's protocol
  // version and holds no secret that is not for the group's ranks. Throws Error when this process
  // cannot use the transport; its text becomes the reason that peers see.
  virtual std::string describe(const Config& config) = 0;
  // Why the transport cannot serve these two ranks; empty when it can. A pure function of its
  // arguments, so all ranks come to the same verdict.
  virtual std::string why_not(const std::string& description, const std::string& other) = 0;
  // Throws Error that names the ranks that did not come.
  virtual std::unique_ptr<Transport> connect(const ConnectRequest& request) = 0;

  // Around fork(2), in the forking thread. A child must not keep sockets open: peers would not see
  // their end when the parent dies. before_fork() takes the lock of the table of descriptors (a
  // leaf: nothing is waited for under it), after_fork_child() closes them and touches nothing else.
  virtual void before_fork() {}
  virtual void after_fork_parent() {}
  virtual void after_fork_child() {}
};

}  // namespace pycoll
