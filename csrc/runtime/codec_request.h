// What callers ask of a collective whose data travels as codes.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "kernels/codec.h"
#include "runtime/operation.h"
#include "runtime/overlap.h"

namespace pycoll {

class Communicator;

// How the values of a call travel.
struct CodecChoice {
  Codec codec;
  // Of stochastic rounding; the group sets the rank. Without a step: the number of the call.
  uint64_t seed = 0;
  std::optional<uint32_t> step{};
  // Error feedback (see EncodeRequest), or no blocks: float32, as long as the input, and of the
  // encoded sum of an all_reduce, as long as the output, of which each rank uses its own chunk.
  // After an error they may be updated in parts.
  VectorView residual{};
  VectorView sum_residual{};
};

// A call as it would run without a codec, with one.
struct CodecRequest : CallRequest, CodecChoice {
  uint64_t first = 0;  // index of the first value in a longer vector
  // Of an all_reduce: run when the result is in `output`, in the order of the calls of the group,
  // which `finalize` is not: by the thread that drives the lane in which the call ends.
  std::function<void()> in_order{};

  std::vector<Touched> touched() const;
};

// Whether such a call is compressed at all in a group of so many ranks; the same answer on every
// rank. Else it is to be run as it is: integers, bool, float64, complex; reductions other than SUM
// and AVG; groups of one.
bool can_compress(int world_size, Collective collective, DType dtype, ReduceOp op);

// Throws what Communicator::check() throws of the same call without a codec,
// Error(invalid_argument) for a codec or residuals that cannot be, Error(not_implemented) for a
// call that is not compressed.
void check_codec_request(const Communicator& group, const CodecRequest& request);

}  // namespace pycoll
