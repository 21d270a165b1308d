// What the host may ask of the GPU: every kernel of pycoll, by a function that launches it. Those
// over lists of tensors are in fused.h.
//
// No CUDA language and no C++ beyond plain structs, so that any host compiler takes it. All
// functions only launch: they return what the runtime said about that (cudaErrorInvalidValue when a
// precondition that they check is broken, and then nothing was launched), never wait, allocate or
// synchronise, and are safe inside a graph capture. Launch geometry is a pure function of sizes,
// types and Geometry, the same on every rank.
//
// Vectors are aligned to their elements (complex numbers: to their parts). 16-byte accesses are
// used where all memory of a step is aligned to 16 bytes; results never depend on alignment.
//
// Arithmetic follows kernels/reduce.h: partial sums of 16 and 8-bit floats are float32 and rounded
// once; AVG divides when a sum is complete; integers wrap. Where operands are combined in the same
// order, results are the CPU kernels' to the bit (nvcc -fmad=false, no fast math), but for the
// payload of NaNs under SUM, AVG and PRODUCT of floats, which the hardware does not keep.
#pragma once

#include <cuda_runtime_api.h>

#include "core/dtype.h"
#include "kernels/codec.h"
#include "kernels/cuda/layout.h"
#include "kernels/cuda/program_image.h"

namespace pycoll::cuda {

// Element type and reduce operation of a call; op none: bytes are moved. premul_sum sums what
// scale() has scaled.
struct Arithmetic {
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::none;
  int32_t world_size = 1;  // what AVG divides by
};

// Whether the kernels can combine elements of that kind; the pairs of find_reduce_kernels().
bool can_reduce(DType dtype, ReduceOp op);

// A caller's vector in device memory: `blocks` blocks of count[i] elements. Either one block, which
// is cut into chunks (all_reduce, broadcast, reduce, and what is one block anyway), or, where a
// collective has a block a rank, that many, also if they lie together. `blocks` 0: this rank has
// none.
struct Vector {
  void* block[kMaxBlocks] = {};
  uint64_t count[kMaxBlocks] = {};
  int32_t blocks = 0;
};

// ---- Ranks on different devices: kernels that wait for their peers' kernels. Blocks with the same
// index must be resident on all ranks at a time, and lanes of a Program wait for each other: a
// device must have room for the whole grid of a call, of a batch of messages beside it, and of
// other ranks on it. A block takes up to 512 threads and 64 K registers, so one multiprocessor each
// is enough. ----

// The largest grids that a Geometry leads to. Choose its fifos, message_fifos and blocks so that
// the sum has room on the smallest device of the group.
struct GridLimits {
  int32_t collective = 0;
  int32_t messages = 0;
};
GridLimits grid_limits(const Geometry& geometry);

// Runs a Program (or a batch of messages) over FIFOs and windows. Any collective; in place as
// program.h says.
struct ProgramCall {
  Call call;
  Arithmetic arithmetic;
  Vector input;
  Vector output;
  const ProgramImage* image = nullptr;
  const ProgramStep* steps = nullptr;  // image->steps in device memory
};
cudaError_t run_program(const GroupView& group, const ProgramCall& call, cudaStream_t stream);

// How a Program is cut: exported for tests and for `explain`.
struct ProgramPlan {
  uint64_t slice = 0;    // elements (of Elements::size)
  uint64_t rounds = 0;   // slices of this rank's longest chunk; 1 at least
  int32_t channels = 0;  // slice r runs on channel r % channels
  int32_t threads =
      0;  // a block; the grid has lanes * channels of them, block = lane * channels + channel
  int32_t first_fifo = 0;
};
ProgramPlan plan_program(const Geometry& geometry, const ProgramCall& call);

// all_reduce of float32, float16 or bfloat16 under SUM or AVG, summed in rank order. `output` may
// be `input`.
struct AllReduceCall {
  Call call;
  Arithmetic arithmetic;
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t count = 0;
};
bool has_fast_all_reduce(DType dtype, ReduceOp op);
// Data and flag in one 64-bit word (the LL protocol), for the smallest messages: at most
// one_shot_ll_limit() bytes.
uint64_t one_shot_ll_limit(const Geometry& geometry);
cudaError_t all_reduce_one_shot_ll(const GroupView& group, const AllReduceCall& call,
                                   cudaStream_t stream);
// Every rank reads every rank's window. Any size; meant for those where latency rules.
cudaError_t all_reduce_one_shot(const GroupView& group, const AllReduceCall& call,
                                cudaStream_t stream);
// Every rank sums a part, then reads the others' sums. Any size.
cudaError_t all_reduce_two_shot(const GroupView& group, const AllReduceCall& call,
                                cudaStream_t stream);

// ---- Ranks that share a device: kernels of different processes take turns there, so these never
// wait. The host orders phases by events: all inputs are complete before, nobody touches what these
// read or write until after. ----

// output[t][begin .. end) = sum over sources in order of input[s][begin .. end), finished, for each
// target t; one rank's part of an all_reduce (all outputs), reduce_scatter (its own) or reduce (the
// root's). In place: an output that is an input is the same address. Pointers are to element 0.
struct ReduceManyCall {
  Arithmetic arithmetic;
  int32_t sources = 0;  // 1 to kMaxRanks
  int32_t targets = 0;  // 1 to kMaxRanks
  const void* input[kMaxRanks] = {};
  void* output[kMaxRanks] = {};
  uint64_t begin = 0;
  uint64_t end = 0;
};
cudaError_t reduce_many(const ReduceManyCall& call, cudaStream_t stream);

// Copies that overlap nothing: all_gather, broadcast, gather, scatter, all_to_all, send and recv as
// plain reads of peers' memory. A copy of a place onto itself is skipped.
struct CopyManyCall {
  int32_t copies = 0;  // 0 to kMaxRanks
  const void* src[kMaxRanks] = {};
  void* dst[kMaxRanks] = {};
  uint64_t bytes[kMaxRanks] = {};
};
cudaError_t copy_many(const CopyManyCall& call, cudaStream_t stream);

// A vector whose place only its owner knows, who writes it to a word before the kernel begins: this
// rank has mapped the owner's memory, and the word says where in it. So no host waits for another.
struct PeerPlace {
  const uint64_t* word = nullptr;   // the owner's place_word(); nullptr, or a word 0: see `staged`
  const uint64_t* table = nullptr;  // where this rank has mapped each slot of the owner's
  std::byte* staged = nullptr;
  uint64_t offset = 0;  // bytes behind the place in the word
};
constexpr int kPlaceSlots = 32;
constexpr uint64_t place_word(uint64_t slot, uint64_t offset) {
  return (slot + 1) << 48 | offset;
}

// What other ranks say that they are in, and what this one takes that for. Bits that are not in
// kComparedBits may differ. A kernel that finds another word does nothing but tell of the first: it
// stores that to differs[i], and what it was taken for to differs[self].
struct Agreement {
  const uint64_t* theirs[kMaxRanks] = {};  // by rank; nullptr: not asked
  uint64_t expected[kMaxRanks] = {};
  int32_t self = 0;
  uint64_t* differs = nullptr;  // [kMaxRanks], pinned host memory
};
constexpr uint64_t kComparedBits = ~(uint64_t{0x1ff} << 54);

// reduce_many() and copy_many() with such places in the stead of addresses. They do nothing where
// the word `given_up`, of this rank, is not 0: nobody writes to peers' vectors for a dead group.
struct ReducePlacesCall {
  const uint32_t* given_up = nullptr;
  Agreement agreement;
  Arithmetic arithmetic;
  int32_t sources = 0;
  int32_t targets = 0;
  PeerPlace input[kMaxRanks] = {};
  PeerPlace output[kMaxRanks] = {};
  uint64_t begin = 0;
  uint64_t end = 0;
};
cudaError_t reduce_places(const ReducePlacesCall& call, cudaStream_t stream);

struct CopyPlacesCall {
  const uint32_t* given_up = nullptr;
  Agreement agreement;
  int32_t copies = 0;
  PeerPlace src[kMaxRanks] = {};
  void* dst[kMaxRanks] = {};
  uint64_t bytes[kMaxRanks] = {};
};
// Without copies it compares `agreement` all the same, if there is one.
cudaError_t copy_places(const CopyPlacesCall& call, cudaStream_t stream);

// ---- Elementwise. ----

// output[i] = round(input[i] * scale) between float32, float16 and bfloat16, product in float32
// (scale 1 is exact). `found_inf`, where not nullptr, is set to 1 when a result is inf or NaN and
// left alone otherwise: what a loss scaler asks for. One type may be cast in place.
struct CastCall {
  DType from = DType::float32;
  DType to = DType::float32;
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t count = 0;
  float scale = 1.0f;
  float* found_inf = nullptr;  // device memory; as torch's GradScaler has it
};
cudaError_t cast(const CastCall& call, cudaStream_t stream);

// output[i] = input[i] * factor, rounded once, for PREMUL_SUM: ScaleFn of kernels/reduce.h. In
// place or apart.
struct ScaleCall {
  DType dtype = DType::float32;
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t count = 0;
  double factor = 1.0;
};
cudaError_t scale(const ScaleCall& call, cudaStream_t stream);

// ---- Codecs: the codes and values of kernels/codec.h to the byte. Several vectors a call, since a
// collective has one for each peer. Codes are aligned to 16 bytes, as those are that lie one after
// the other in memory that is; values and residuals to their elements. ----

constexpr uint64_t kCodeAlignment = 16;
constexpr int kMaxVectors = 2 * kMaxRanks;

struct EncodeManyCall {
  struct Vector {
    const void* values = nullptr;
    uint64_t count = 0;
    std::byte* code = nullptr;  // code_bytes(codec, count)
    float* residual = nullptr;  // as in EncodeRequest
    uint64_t first = 0;         // added to key.first
  };
  Codec codec;
  RandomKey key;
  DType dtype = DType::float32;
  int32_t vectors = 0;  // 0 to kMaxVectors
  int32_t blocks = 0;   // of the grid at most; 0: as many as are of use
  Vector vector[kMaxVectors] = {};
};
cudaError_t encode_many(const EncodeManyCall& call, cudaStream_t stream);

// Vector v has the codes code[v * codes], code[v * codes + 1], ..., which are summed in that order.
constexpr int kMaxCodes = 4 * kMaxRanks;

struct DecodeManyCall {
  struct Vector {
    void* values = nullptr;
    uint64_t count = 0;
  };
  Codec codec;
  DType dtype = DType::float32;
  float divisor = 1;
  int32_t vectors = 0;  // 0 to kMaxVectors
  int32_t codes = 1;    // of a vector; in all kMaxCodes at most
  int32_t blocks = 0;   // as above
  Vector vector[kMaxVectors] = {};
  const std::byte* code[kMaxCodes] = {};
};
cudaError_t decode_many(const DecodeManyCall& call, cudaStream_t stream);

}  // namespace pycoll::cuda
