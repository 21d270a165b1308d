// A Program as the executor kernel reads it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/layout.h"
#include "program/program.h"

namespace pycoll::cuda {

// Blocks of memory that a call may have on each side: one a rank, or one a message of a batch.
constexpr int kMaxBlocks = 2 * kMaxRanks;

// Lanes of a Program, or of a batch of messages: one a peer and direction.
constexpr int kMaxImageLanes = 2 * kMaxRanks;

// One step, 32 bytes. Bits of `does` follow StepTraits.
struct ProgramStep {
  enum : uint8_t { receives = 1, reduces = 2, reads = 4, stores = 8, sends = 16 };
  uint8_t kind = 0;  // StepKind
  uint8_t does = 0;
  uint8_t src = 0;  // Space
  uint8_t dst = 0;  // Space
  uint8_t from = 0;
  uint8_t to = 0;
  uint8_t channel = 0;
  uint8_t length_of = 0;       // Space::input or output: whose chunk `length_chunk` says how long
  uint8_t received_acc = 0;    // the message holds partial sums
  uint8_t sent_acc = 0;        // the message that leaves does
  uint8_t received_first = 1;  // received (+) src
  uint8_t unused = 0;
  int32_t src_chunk = 0;
  int32_t dst_chunk = 0;
  int32_t length_chunk = 0;
  int32_t remote_chunk = 0;
  uint32_t members = 0;  // barrier, reduce_from: bit r is rank r
};
static_assert(sizeof(ProgramStep) == 32);

// A lane's steps, and which ends of FIFOs are its own: bit (peer * kMaxChannels + channel).
struct ProgramLane {
  int32_t first = 0;
  int32_t count = 0;
  uint64_t sends = 0;
  uint64_t receives = 0;
  uint32_t meets = 0;        // it has barriers
  uint32_t uses_window = 0;  // its rounds alternate between the two windows
};
static_assert(kMaxRanks * kMaxChannels <= 64);

// The part that travels with each launch.
struct ProgramHeader {
  int32_t lanes = 0;
  int32_t channels = 1;  // of the Program: FIFOs that a pair needs a channel of the kernel
  int32_t input_chunks = 1;
  int32_t output_chunks = 1;
  int32_t acc_chunks = 0;
  int32_t window_chunks = 0;
  // Steps run one after the other, each over all its slices: messages, which peers may batch
  // differently. Else all steps run for a slice, then for the next.
  int32_t step_by_step = 0;
  // Only the two ranks of a message know its length: it joins the fingerprint.
  int32_t pairwise = 0;
  ProgramLane lane[kMaxImageLanes];
};

// Made once a Program and kept; `steps` is copied to device memory as it is.
struct ProgramImage {
  ProgramHeader header;
  std::vector<ProgramStep> steps;
};

// Throws Error(not_implemented) for Programs that work on peers' vectors (needs_lease) or have more
// than kMaxRanks ranks. The Program must be valid (program.h).
ProgramImage compile(const Program& program);

// One message of a batch. Sends take their data from blocks 0, 1, ... of the call's input, receives
// store to blocks 0, 1, ... of its output, in the order of the list.
struct MessageStep {
  bool sends = false;
  int32_t peer = 0;
};

// A batch of messages that make progress together, as between ncclGroupStart and ncclGroupEnd;
// those to (or from) one peer keep their order. At most kMaxBlocks of each direction: a longer list
// cannot simply be cut in two, because a kernel ends only when all its messages have.
ProgramImage compile_messages(const std::vector<MessageStep>& messages);

}  // namespace pycoll::cuda
