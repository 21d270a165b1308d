// What a collective call is, as its peers see it.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "core/dtype.h"
#include "program/program.h"

namespace pycoll {

// Announced by every rank at the start of every operation (plain data: it lies in shared memory and
// will travel over sockets). A mismatch between ranks is found by comparing fingerprints; the whole
// header is what the error message is made from.
struct CallHeader {
  uint64_t sequence = 0;  // of the group, counts from 1
  uint64_t count = 0;  // elements of the tensor; of all_gather's input, of reduce_scatter's output
  uint64_t deadline_ms = 0;  // the operation's timeout
  Collective collective = Collective::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::none;
  uint8_t codec = 0;  // 0: no compression
  int32_t root = 0;   // with a codec: pack_call() of the call whose codes these are
  // Hash of its name: ranks that chose differently must not talk. With a codec, of that call's
  // lengths too; 0: it is that call itself, which operations of other groups carry out.
  uint32_t algorithm = 0;
  // Hash of the blocks' lengths where they differ and every rank knows them all; 0: they are equal.
  uint32_t layout = 0;
};
static_assert(sizeof(CallHeader) == 40 && std::is_trivially_copyable_v<CallHeader>);

// In place of a codec: a split of the group. `root`: how it has ended on this rank.
constexpr uint8_t kSplit = 0xff;
constexpr int32_t kSplitFailed = -1;

// Hash of all that must agree: everything but the deadline. Never 0.
uint32_t fingerprint(const CallHeader& call);

// All of a call but its lengths; the root's lowest 8 bits.
int32_t pack_call(Collective collective, DType dtype, ReduceOp op, int root);

// "all_reduce #12 (sum, 1024 x float32)"; with a codec "all_reduce #12 over codes (int8 in blocks
// of 256, sum, 1024 x float32)", and its operations "all_reduce over codes (int8 in blocks of 256,
// sum, float32), as all_to_all #2"; "split #3".
std::string to_string(const CallHeader& call);

// What differs, in words: "sizes differ: 4 elements on rank 0, 6 on rank 1".
std::string describe_mismatch(int rank, const CallHeader& mine, int peer, const CallHeader& theirs);

}  // namespace pycoll
