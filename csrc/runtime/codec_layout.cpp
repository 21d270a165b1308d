#include "runtime/codec_layout.h"

#include <algorithm>

#include "transport/call.h"

namespace pycoll {
namespace {

// Values of a piece. Of a chunk there are some eight, so that encoding, the wire and decoding
// overlap; an operation costs as much as the wire takes for tens of thousands of values, and beyond
// a million codes leave the cache between encoding and sending.
constexpr uint64_t kPieces = 8;
constexpr uint64_t kLeastPiece = uint64_t{1} << 16;
constexpr uint64_t kMostPiece = uint64_t{1} << 20;

// Values of a segment. Of a vector there are some four, so that what happens inside of hosts
// overlaps with the network; below half a million, three more operations cost more than that saves.
constexpr uint64_t kSegments = 4;
constexpr uint64_t kLeastSegment = uint64_t{1} << 19;
constexpr uint64_t kMostSegment = uint64_t{1} << 23;

// Others than those of this rank's values, and of messages (kOfMessages of codec_group.cpp).
constexpr uint32_t kOfSums = 0x80000000u;

// Of the lengths that every rank knows: those of an all_to_all are each pair's own.
uint32_t hash_lengths(const CodecRequest& request) {
  if (request.collective == Collective::all_to_all) return 0;
  uint64_t hash = 0x9e3779b97f4a7c15ull;
  // Only the root of a broadcast must have an input; an all_gather's outputs are everybody's.
  const bool sums_up = sums(request.collective);
  for (const Block& block : (sums_up ? request.input : request.output).blocks) {
    hash = (hash ^ block.count) * 0xbf58476d1ce4e5b9ull;
    hash ^= hash >> 29;
  }
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

}  // namespace

uint64_t whole_units(const Codec& codec, uint64_t count) {
  const uint64_t unit = std::max<uint64_t>(codec.block, 64);
  return (count + unit - 1) / unit * unit;
}

Range share_of(const Codec& codec, uint64_t count, int ranks, int rank) {
  const auto of = static_cast<uint64_t>(ranks);
  const uint64_t length = whole_units(codec, (count + of - 1) / of);
  const uint64_t begin = std::min(static_cast<uint64_t>(rank) * length, count);
  return {begin, std::min(length, count - begin)};
}

bool sums(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce_scatter;
}
bool exchanges(Collective collective) {
  return sums(collective) || collective == Collective::all_to_all;
}

OverCodec over_of(const CodecRequest& request) {
  return {wire_tag(request.codec),
          pack_call(request.collective, request.dtype, request.reduce_op, request.root),
          // The call has room for the lower bits of a root.
          hash_lengths(request) ^ static_cast<uint32_t>(request.root >> 8) * 0x9e3779b9u};
}

RandomKey key_of_values(const CodecRequest& request, int rank) {
  return {request.seed, *request.step, static_cast<uint32_t>(rank), 0};
}
RandomKey key_of_sums(const CodecRequest& request, int rank) {
  return {request.seed, *request.step, static_cast<uint32_t>(rank) | kOfSums, 0};
}

// ---- Between hosts. ----

std::vector<Range> host_segments(const Codec& codec, uint64_t count, int ranks) {
  // Whole units for each rank of the host.
  const auto of = static_cast<uint64_t>(ranks);
  const uint64_t about = std::clamp(count / kSegments, kLeastSegment, kMostSegment);
  const uint64_t length = whole_units(codec, (about + of - 1) / of) * of;
  std::vector<Range> segments;
  uint64_t begin = 0;
  do {
    segments.push_back({begin, std::min(length, count - begin)});
    begin += segments.back().count;
  } while (begin < count);
  return segments;
}

Block block_of(const VectorView& vector, size_t element, const Range& range) {
  return {vector.blocks[0].data + range.begin * element, range.count};
}

CodecRequest crossing_of(const CodecRequest& request, const Range& segment, int ranks, int place) {
  const Range share = share_of(request.codec, segment.count, ranks, place);
  const Range part{segment.begin + share.begin, share.count};
  CodecRequest call;
  call.timeout = request.timeout;
  call.collective = Collective::all_reduce;
  call.codec = request.codec;
  call.dtype = request.dtype;
  // The mean of the hosts' means is the mean: they have as many ranks.
  call.reduce_op = request.reduce_op;
  call.seed = request.seed;
  call.step = request.step;
  call.first = request.first + part.begin;
  call.output.blocks.push_back(block_of(request.output, size_of(request.dtype), part));
  call.input = call.output;
  const auto residual_of = [&part](const VectorView& residual) {
    VectorView mine;
    if (!residual.blocks.empty()) mine.blocks.push_back(block_of(residual, sizeof(float), part));
    return mine;
  };
  call.residual = residual_of(request.residual);
  call.sum_residual = residual_of(request.sum_residual);
  return call;
}

// ---- Chunks and pieces. ----

CodecLayout::CodecLayout(const CodecRequest& request, int world_size, int rank)
    : codec_(request.codec),
      collective_(request.collective),
      element_(size_of(request.dtype)),
      world_size_(world_size),
      rank_(rank),
      input_(chunks_of(request, request.input, request.residual)),
      output_(chunks_of(request, request.output, request.sum_residual)) {
  for (const Part& chunk : input_) longest_ = std::max(longest_, chunk.count);
  for (const Part& chunk : output_) longest_ = std::max(longest_, chunk.count);
  // Ranks know only their own lengths of an all_to_all: one piece, or they would cut differently.
  const bool cut = collective_ != Collective::all_to_all;
  const uint64_t piece = cut ? std::clamp(longest_ / kPieces, kLeastPiece, kMostPiece) : longest_;
  piece_count_ = whole_units(codec_, std::max<uint64_t>(std::min(piece, longest_), 1));
  pieces_ =
      static_cast<uint32_t>(std::max<uint64_t>((longest_ + piece_count_ - 1) / piece_count_, 1));
}

std::vector<CodecLayout::Part> CodecLayout::chunks_of(const CodecRequest& request,
                                                      const VectorView& vector,
                                                      const VectorView& residual) const {
  std::vector<Part> chunks;
  const auto residual_of = [&](size_t block) {
    return residual.blocks.empty() ? nullptr
                                   : reinterpret_cast<float*>(residual.blocks[block].data);
  };
  if (collective_ != Collective::all_reduce) {
    uint64_t first = request.first;
    for (size_t i = 0; i < vector.blocks.size(); ++i) {
      const Block& block = vector.blocks[i];
      chunks.push_back({block.data, first, block.count, residual_of(i)});
      first += whole_units(codec_, block.count);
    }
    return chunks;
  }
  const Block& whole = vector.blocks[0];
  float* const residuals = residual_of(0);
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto [begin, count] = share_of(codec_, whole.count, world_size_, rank);
    chunks.push_back({whole.data + begin * element_, request.first + begin, count,
                      residuals == nullptr ? nullptr : residuals + begin});
  }
  return chunks;
}

const CodecLayout::Part& CodecLayout::received_from(size_t peer) const {
  if (collective_ == Collective::reduce_scatter) return output_[0];
  return collective_ == Collective::all_reduce ? input_[static_cast<size_t>(rank_)] : output_[peer];
}

CodecLayout::Part CodecLayout::piece_of(const Part& chunk, uint32_t piece) const {
  const uint64_t begin = std::min(piece * piece_count_, chunk.count);
  const uint64_t end = std::min(begin + piece_count_, chunk.count);
  return {chunk.data + begin * element_, chunk.first + begin, end - begin,
          chunk.residual == nullptr ? nullptr : chunk.residual + begin};
}

uint64_t CodecLayout::slot_bytes(const Part& chunk) const {
  return code_bytes(codec_, std::min(chunk.count, piece_count_));
}

}  // namespace pycoll
