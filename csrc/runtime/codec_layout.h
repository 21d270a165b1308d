// How a call over a codec is cut, whoever carries it out. Ranks on CPUs and on GPUs have the same
// pieces and the same random numbers, and so the same bits.
#pragma once

#include <vector>

#include "runtime/codec_request.h"

namespace pycoll {

// Elements [begin, begin + count) of a vector.
struct Range {
  uint64_t begin;
  uint64_t count;
};

// Vectors are cut between units: whole blocks, and whole groups of random numbers.
uint64_t whole_units(const Codec& codec, uint64_t count);
// A rank's share of so many elements; the same for all ranks, but for the end.
Range share_of(const Codec& codec, uint64_t count, int ranks, int rank);

// Those that reduce: their codes are exchanged and summed by the owners of chunks.
bool sums(Collective collective);
// Those whose codes are exchanged; of the others they are gathered at once.
bool exchanges(Collective collective);

// What the codes of a call stand for.
OverCodec over_of(const CodecRequest& request);

// Of an all_reduce whose part between hosts alone is compressed: each segment has a share for every
// rank of a host.
std::vector<Range> host_segments(const Codec& codec, uint64_t count, int ranks);
// The all_reduce over the codec of the `place`th share of a segment, in place of the output.
CodecRequest crossing_of(const CodecRequest& request, const Range& segment, int ranks, int place);
Block block_of(const VectorView& vector, size_t element, const Range& range);

class CodecLayout {
 public:
  // Elements of a block, as a chunk or a piece of one.
  struct Part {
    std::byte* data;
    uint64_t first;  // index in the whole vector, for random numbers
    uint64_t count;
    float* residual = nullptr;
  };

  CodecLayout(const CodecRequest& request, int world_size, int rank);

  // Chunks, by rank, are cut into pieces alike on all ranks.
  const std::vector<Part>& input() const { return input_; }
  const std::vector<Part>& output() const { return output_; }
  // What a peer's codes of the exchange are of.
  const Part& received_from(size_t peer) const;
  uint64_t piece_count() const { return piece_count_; }  // elements of a piece
  uint32_t pieces() const { return pieces_; }            // of the longest chunk; 1 at least
  Part piece_of(const Part& chunk, uint32_t piece) const;
  // Of the longest piece of a chunk.
  uint64_t slot_bytes(const Part& chunk) const;
  uint64_t longest() const { return longest_; }

 private:
  std::vector<Part> chunks_of(const CodecRequest& request, const VectorView& vector,
                              const VectorView& residual) const;

  const Codec codec_;
  const Collective collective_;
  const size_t element_;
  const int world_size_;
  const int rank_;
  std::vector<Part> input_;
  std::vector<Part> output_;
  uint64_t longest_ = 0;  // chunk of this rank's
  uint64_t piece_count_ = 0;
  uint32_t pieces_ = 0;
};

// The random numbers of a rank's values, and, others than those, of the sums that it encodes. The
// index of the part is not in them.
RandomKey key_of_values(const CodecRequest& request, int rank);
RandomKey key_of_sums(const CodecRequest& request, int rank);

}  // namespace pycoll
