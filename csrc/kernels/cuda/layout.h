// Memory that the kernels of a group meet in: what lies where, and who writes it.
//
// Every rank has one *region* of device memory, mapped by all peers, and a few words of pinned host
// memory. Each word has exactly one writer. What peers write lies in the memory of the rank that
// waits for it, so that waiting stays on its own device. Words are counters that only grow (modulo
// 2^32) and live in device memory: kernels advance them, so a captured graph may be replayed any
// number of times, mixed with other calls.
//
// Everything that belongs to a *lane* of the grid (a block of a kernel, by its index) is touched by
// that block only and by the blocks with the same index at the peers. Blocks never wait for each
// other inside a rank, so any number of them may be resident, as long as blocks of one index are
// resident on all ranks at a time.
//
// No CUDA language: host code includes this too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll::cuda {

// Ranks whose memory one kernel maps (GPUs of one host); sizes tables that are passed by value.
constexpr int kMaxRanks = 16;

// What the ranks of a group agree on when they meet; the same numbers on every rank. It decides
// launch geometry, so ranks with different capabilities agree on the least of each.
struct Geometry {
  int32_t world_size = 1;
  int32_t fifos = 32;               // a pair of ranks, in each direction, for collectives
  int32_t message_fifos = 2;        // the same for send and recv, which may run beside a collective
  int32_t depth = 4;                // slots of a FIFO: a power of two, 2 at least
  uint32_t slot_bytes = 128 << 10;  // of a slot, a multiple of 64
  int32_t blocks = 64;              // blocks that meet in windows
  uint32_t window_bytes = 128 << 10;  // a block has two, a multiple of 64
  uint32_t packets = 1024;            // 4-byte words a block and peer for one_shot_ll, twice
  uint64_t scratch_bytes = 32 << 20;  // accumulators of all blocks, private
  int32_t threads = 512;              // a block: at most, and a multiple of 32 on hardware

  int32_t all_fifos() const { return fifos + message_fifos; }
};

// Why `geometry` cannot be used, as a sentence; nullptr when it can.
const char* why_unusable(const Geometry& geometry);

// Byte offsets in a region. The allocation must be `bytes` long, aligned to 256 and zeroed before
// any peer maps it. [] are array dimensions; "peer" is the rank that the other end of a FIFO is at.
struct RegionLayout {
  explicit RegionLayout(const Geometry& geometry);
  RegionLayout() = default;

  // Written by peers.
  uint64_t message_flags = 0;   // u64 [peer][fifo][slot]: message number | fingerprint << 32
  uint64_t credits = 0;         // u32 [peer][fifo]: messages of mine that the peer has read
  uint64_t arrivals = 0;        // u64 [block][peer]: barrier number | fingerprint << 32
  uint64_t packet_credits = 0;  // u32 [block][peer]: rounds of mine that the peer has read
  uint64_t slots = 0;           // [peer][fifo][slot][slot_bytes]
  uint64_t packets = 0;         // u64 [block][2][peer][1 + packets]: data | stamp of round << 32
  // Written by this rank, read by peers.
  uint64_t windows = 0;  // [block][2][window_bytes]
  // Private.
  uint64_t failed = 0;         // u32: not 0 once a kernel of this rank gave up
  uint64_t sent = 0;           // u32 [peer][fifo]
  uint64_t received = 0;       // u32 [peer][fifo]
  uint64_t barriers = 0;       // u32 [block]: barriers passed
  uint64_t window_rounds = 0;  // u32 [block]: its parity selects the window
  uint64_t packet_rounds = 0;  // u32 [block]
  uint64_t scratch = 0;        // [scratch_bytes]
  uint64_t bytes = 0;
};

// What went wrong in a kernel.
enum class Trouble : uint32_t { none, timed_out, aborted, mismatch };

// Written once, by the first block of a rank that gives up. `trouble` is stored last, with release.
struct ErrorRecord {
  uint32_t trouble;     // Trouble
  uint32_t rank;        // of the writer
  uint32_t peer;        // that it waited for, or that differs
  uint32_t collective;  // Collective, as the call says
  uint32_t sequence;    // as the call says; of the captured call when a graph is replayed
  uint32_t block;
  uint32_t step;      // of a Program, in its lane; 0 elsewhere
  uint32_t expected;  // the counter waited for
  uint32_t seen;      // and its last value
  uint32_t theirs;    // mismatch: the peer's fingerprint
};

// Pinned, mapped host memory, one a rank.
struct HostWords {
  uint32_t abort;  // written by the host: not 0 makes waiting kernels end
  uint32_t unused[15];
  ErrorRecord error;  // written by kernels
};

// A rank's view of its group, passed to kernels by value.
struct GroupView {
  std::byte* region[kMaxRanks] = {};  // as this rank maps them; region[rank] is its own
  HostWords* host = nullptr;          // as the device sees it
  int32_t rank = 0;
  Geometry geometry;
  RegionLayout layout;
};

// What ranks agree on about one call. The fingerprint travels with flags: a peer whose fingerprint
// differs is reported before any output is written.
struct Call {
  uint32_t fingerprint = 0;
  uint32_t sequence = 0;    // for error records only
  uint32_t collective = 0;  // for error records only
  // How long one wait may last. The host's watchdog, which writes HostWords::abort, names a late
  // peer earlier; this ends kernels whose host is gone.
  uint64_t timeout_ns = uint64_t{600} * 1000 * 1000 * 1000;
};

}  // namespace pycoll::cuda
