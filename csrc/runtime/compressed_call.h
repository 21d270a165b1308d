// A collective whose data travels as codes, whatever carries it out.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/codec.h"
#include "runtime/composite_call.h"
#include "runtime/overlap.h"

namespace pycoll {

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

// Elements [begin, begin + count) of a vector.
struct Range {
  uint64_t begin;
  uint64_t count;
};

class CompressedCall : public CompositeCall {
 public:
  // The `number`th call of its group.
  void start(uint32_t number);
  bool in_conflict(const Touched& touched) const;
  std::string describe() const override;

 protected:
  CompressedCall(CodecRequest request, int rank, std::shared_ptr<CallHome> home);
  const CodecRequest& request() const { return request_; }
  // Vectors are cut between units: whole blocks, and whole groups of random numbers.
  uint64_t whole_units(uint64_t count) const;
  // A rank's share of so many elements; the same for all ranks, but for the end.
  Range share_of(uint64_t count, int ranks, int rank) const;

 private:
  CodecRequest request_;
};

}  // namespace pycoll
