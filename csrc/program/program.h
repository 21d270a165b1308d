// An algorithm is data.
//
// An algorithm is a pure function that returns, for one rank, a Program: a few lanes, each a list
// of steps on numbered chunks. The same Program is run by the executor (runtime/executor.h), proved
// by the checker (program/check.h) and shown by `pycoll explain` (program/trace.h). Nothing else in
// the system knows an algorithm's name.
//
// How a Program is run
//   * The caller's vectors are cut into chunks (`input_chunks`, `output_chunks`), and each chunk
//     into slices of at most `slice` elements. A lane executes its whole step list for slice 0 of
//     every chunk, then for slice 1, and so on; one pass is a *round*. Lanes advance independently.
//   * All chunks that a step touches have one length (length_class() below): that of its operand in
//     the caller's vectors. all_reduce, broadcast and reduce cut input and output alike, and acc[k]
//     and window[k] stand for chunk k of that cut; the chunks of gather and scatter all have one
//     length; a barrier moves vectors of no elements. The blocks of all_gather and reduce_scatter
//     may differ, with lengths that every rank knows, those of all_to_all with lengths that only
//     the two ranks of a block know.
//   * A rank runs as many rounds as the longest chunk that it knows has slices, and at least one.
//   In
//     round 0 every message is sent, even one of no elements; in later rounds a step whose slice is
//     empty is skipped, by both sides. Barriers are never skipped. The ranks of an all_to_all may
//     run different numbers of rounds: it cannot use barriers, nor windows, which need them.
//   * A message step moves one message, which holds one slice of one chunk, through the FIFO that
//     belongs to (sender, receiver, channel). Only one lane of a rank may use an end of a FIFO. A
//     FIFO is `depth` slots deep: a send waits for a free slot, a receive for a full one. A step
//     that receives and sends starts only when it can do both, so it holds one slot while it waits
//     for another: some Programs need depth 2 (a ring does).
//   * Direct steps work on the `window`, memory that every member can read. It has two buffers a
//     lane, used by alternating rounds. So every round of a lane that touches the window must have
//     a barrier of all readers between a write and its reads; the next round's barrier then
//     protects its reuse. The alternation goes on from one call to the next, and only rounds of
//     Programs that use the window count: a call without barriers in between protects nothing.
//   * A lane's direct steps meet the lanes with the same number at its peers. The n-th barrier of a
//     lane in a call announces n and waits until that lane of every member of its group has
//     announced n or more.
//   * Where a Program `needs_lease`, direct steps also read the `input` of peers and write their
//     `output`, in place: a call begins with an exchange of leases (runtime/leased_call.h), after
//     which the vectors that a rank lends (`lends_input`, `lends_output`) are its peers' too. A
//     barrier must come between the last such access and the lender's end, because then the caller
//     has its vectors back.
//   * Values are `input` elements, partial sums are accumulators (wider for 16-bit types: a sum is
//     rounded once, when it is complete). Storing a partial sum to `output` or `window`, or sending
//     what was stored there, *finishes* it: the division of AVG and the rounding happen there, and
//     only there.
//   * `output` receives finished values only. It may be the same memory as `input` (in place): for
//     all_gather input is then output[rank], for reduce_scatter output is input[rank], at the root
//     of a gather input is output[rank], at the root of a scatter output is input[rank]. An
//     all_to_all is never in place.
//   * Only the root may read the `input` of broadcast and scatter, and only the root has an
//     `output` in reduce and gather.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pycoll {

// What a Program may use at most; they size the control structures of executors and transports.
constexpr int kMaxLanes = 4;
constexpr int kMaxChannels = 4;

// The numeric values travel between ranks (in call headers): append, never reorder.
enum class Collective : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  barrier,
  reduce,
  gather,
  scatter,
  all_to_all,
  kCount,
};

// How many chunks a vector has.
enum class Parts : uint8_t {
  alike,  // as many as the Program likes, input and output into the same
  one,
  world,  // block k belongs to rank k
};

// What is known of the lengths of chunks.
enum class Lengths : uint8_t {
  cut,       // parts of one vector: only the last may be shorter
  equal,     // all blocks have one
  known,     // blocks differ, every rank knows them all
  pairwise,  // blocks differ, only their two ranks know
};

// What a collective's vectors look like. Everything but the builders is written over this table.
struct CollectiveTraits {
  std::string_view name;
  Parts input;
  Parts output;
  Lengths lengths;
  bool reduces;         // contributions are combined, so that a reduce operation is needed
  bool rooted;          // the root matters
  bool input_at_root;   // only the root has one
  bool output_at_root;  // only the root has one
};

const CollectiveTraits& traits_of(Collective collective);

std::string_view name_of(Collective collective);
inline bool reduces(Collective collective) {
  return traits_of(collective).reduces;
}
std::optional<Collective> collective_from_name(std::string_view name);

enum class Space : uint8_t {
  none,
  input,   // the caller's elements, read only
  output,  // the caller's result, finished values only
  acc,     // private accumulators of this lane, one slice a chunk, gone after the round
  window,  // this rank's part of the memory that peers can read
};

struct Ref {
  Space space = Space::none;
  int32_t chunk = 0;
  bool operator==(const Ref&) const = default;
};

// What a message holds: finished or input elements, or accumulators.
enum class Wire : uint8_t { value, partial };

std::string_view name_of(Space space);
std::string_view name_of(Wire wire);

enum class StepKind : uint8_t {
  send,                   // src -> to.                       An acc is sent as partial.
  recv,                   // from -> dst
  recv_copy_send,         // from -> dst, and on to `to`, unchanged
  recv_send,              // from -> on to `to`, unchanged; nothing is stored
  recv_reduce,            // dst = received (+) src           dst acc: partial; output: finished
  recv_reduce_send,       // to <- received (+) src           as partial; nothing is stored
  recv_reduce_copy_send,  // dst = received (+) src, finished, and the same to `to`
  copy,                   // dst = src                        from acc to output or window: finished
  reduce_from,            // dst = sum over group, in list order, of remote[remote_chunk] of each
                          //   member; this rank's own term is src (its input or window)
  copy_from,              // dst = remote[remote_chunk] of `from`
  reduce_to,              // as reduce_from over inputs, and the sum, finished, goes to
                          //   output[dst.chunk] of `to`, or of every member when that is -1
  barrier,                // returns when every member of group has come
  kCount,
};

// Which parts a kind has. Executor, checker and trace are written over these, not over the kinds.
struct StepTraits {
  std::string_view name;
  bool receives;  // takes a message from `from`
  bool reduces;   // combines what it received with src
  bool reads;     // reads src
  bool stores;    // writes dst
  bool sends;     // puts a message to `to`
  bool direct;    // works on windows
};

const StepTraits& traits_of(StepKind kind);

struct Step {
  StepKind kind = StepKind::barrier;
  Ref src{};
  Ref dst{};
  int32_t from = -1;             // message steps and copy_from: the rank that is read
  int32_t to = -1;               // message steps and reduce_to: the rank that is written to
  int32_t channel = 0;           // message steps: which FIFO of the pair
  int32_t group = -1;            // barrier, reduce_from, reduce_to: index into Program::groups
  int32_t remote_chunk = 0;      // reduce_from, copy_from, reduce_to: the chunk at the peer
  Space remote = Space::window;  // the same: its space, window or (with a lease) input
  Wire wire = Wire::value;       // what the received message holds
  bool received_first = true;    // reduces: received (+) src, else src (+) received
  bool operator==(const Step&) const = default;
};

struct Lane {
  std::vector<Step> steps;
  bool operator==(const Lane&) const = default;
};

// The order in which contributions are combined: a promise, proved by the checker.
enum class Order : uint8_t {
  none,         // nothing is reduced
  rank_order,   // (((0 + 1) + 2) + 3)
  ring_order,   // along Program::ring from a rank that depends on the chunk, wrapping round
  lower_first,  // at every sum, the operand with the lowest rank stands on the left
};

std::string_view name_of(Order order);

// What one rank does.
struct Program {
  Collective collective = Collective::barrier;
  std::string algorithm;
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t root = 0;           // rooted collectives
  int32_t input_chunks = 0;   // equal parts of the input vector
  int32_t output_chunks = 0;  // equal parts of the output vector
  int32_t acc_chunks = 0;     // accumulators a lane
  int32_t window_chunks = 0;  // window chunks a lane
  int32_t channels = 1;       // FIFOs a pair of ranks, in each direction
  Order order = Order::none;
  std::vector<int32_t> ring;  // ring_order: the ranks as they stand in it; empty: 0, 1, 2, ...
  std::vector<std::vector<int32_t>> groups;  // member lists of direct steps
  std::vector<Lane> lanes;
  bool needs_lease = false;   // peers' vectors are read or written; the same on all ranks
  bool lends_input = false;   // peers read this rank's input
  bool lends_output = false;  // peers write this rank's output

  bool uses_window() const { return window_chunks > 0; }
};

// Elements [begin, end) of chunk `chunk` of a vector of `count` elements cut into `chunks` parts of
// equal size, rounded up to `align` elements so that chunks start on cache lines (the last ones may
// be shorter or empty).
struct ChunkRange {
  uint64_t begin;
  uint64_t end;
  uint64_t size() const { return end - begin; }
};
ChunkRange chunk_range(uint64_t count, int32_t chunks, int32_t chunk, uint64_t align);

// The output chunk that is the same memory as input[chunk] when the call is in place; -1: none.
int32_t output_in_place(const Program& program, int32_t input_chunk);

// Chunks of one class have one length, whatever the lengths of a call are; the same numbers on all
// ranks. A step's class is that of its operand in the caller's vectors; if it has none, acc[k] and
// window[k] count as chunk k of the vector with more chunks.
int32_t length_classes(const Program& program);
int32_t length_class(const Program& program, Ref ref);
int32_t length_class(const Program& program, const Step& step);
// Of the chunk that a direct step reads at `peer`.
int32_t remote_length_class(const Program& program, const Step& step, int32_t peer);

// "recv_reduce_send received + input[2], 1 -> 3": for errors and for explain.
std::string to_string(const Step& step);
std::string to_string(Ref ref);

// Where a step of `program` stands, for every message about it:
// "rank 2, lane 0, step 3 (recv_reduce_send received + input[2], 1 -> 3)".
std::string describe_step(const Program& program, size_t lane, size_t step);

// Bounds of every index: chunk numbers, ranks, groups, spaces that a kind may read or write, chunks
// of one size in a step, one lane at each end of a FIFO. Throws Error(invalid_argument) that names
// rank, lane and step. The executor runs only valid Programs, so a wrong Program computes wrong
// numbers or waits for ever; it never touches memory that is not its own.
void validate(const Program& program);

}  // namespace pycoll
