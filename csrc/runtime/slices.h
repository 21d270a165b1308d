// Where chunks and slices lie in the caller's vectors.
#pragma once

#include <algorithm>

#include "runtime/executor_input.h"

namespace pycoll {

// A chunk of a caller's vector: elements [range.begin, range.end) of a block.
struct Place {
  std::byte* block = nullptr;
  ChunkRange range{0, 0};
};

// Cuts the caller's vectors as a Program asks.
class ChunkCutter {
 public:
  ChunkCutter(const Program& program, const VectorView& input, const VectorView& output,
              size_t element)
      : program_(program),
        input_(input),
        output_(output),
        align_(64 / std::min<size_t>(element, 64)) {}

  Place place_of(Ref ref) const {
    return ref.space == Space::input ? place(input_, program_.input_chunks, ref.chunk)
                                     : place(output_, program_.output_chunks, ref.chunk);
  }

  // The chunk that a step works on: that of its operand in the caller's vectors, if it has one;
  // length_class() says the same. Accumulator and window chunk k have the size of chunk k of the
  // vector that has more chunks; where all have one size, that of the vector that every rank has.
  ChunkRange range_of(const Step& step) const {
    const StepTraits& traits = traits_of(step.kind);
    if (traits.reads && in_vectors(step.src)) return place_of(step.src).range;
    if (traits.stores && in_vectors(step.dst)) return place_of(step.dst).range;
    const bool more_inputs = program_.input_chunks >= program_.output_chunks;
    if (length_classes(program_) == 1) {
      const bool has_input = program_.input_chunks <= program_.output_chunks;
      return place_of({has_input ? Space::input : Space::output, 0}).range;
    }
    const Ref ref = traits.reads ? step.src : step.dst;
    return place_of({more_inputs ? Space::input : Space::output, ref.chunk}).range;
  }

  // A chunk of a peer's vector, in elements of that vector, and how many it has in all: what every
  // rank knows, so not of an all_to_all.
  ChunkRange range_at(int32_t peer, Ref ref) const {
    const Parts parts = parts_of(ref.space);
    if (parts == Parts::alike)
      return chunk_range(cut_count(), chunks_of(ref.space), ref.chunk, align_);
    if (parts == Parts::one) return {0, block_of(peer)};
    uint64_t begin = 0;
    for (int32_t k = 0; k < ref.chunk; ++k) begin += block_of(k);
    return {begin, begin + block_of(ref.chunk)};
  }
  uint64_t elements_at(int32_t peer, Space space) const {
    return range_at(peer, {space, chunks_of(space) - 1}).end;
  }

  uint64_t largest_chunk() const {
    return std::max(largest(input_, program_.input_chunks),
                    largest(output_, program_.output_chunks));
  }

 private:
  Parts parts_of(Space space) const {
    const CollectiveTraits& traits = traits_of(program_.collective);
    return space == Space::input ? traits.input : traits.output;
  }
  int32_t chunks_of(Space space) const {
    return space == Space::input ? program_.input_chunks : program_.output_chunks;
  }
  uint64_t cut_count() const { return (input_.blocks.empty() ? output_ : input_).count(); }
  // The block that belongs to a rank, by whichever vector of this rank's has them all; one that has
  // only its own knows that they are equal.
  uint64_t block_of(int32_t rank) const {
    const auto world = static_cast<size_t>(program_.world_size);
    for (const VectorView* view : {&input_, &output_}) {
      if (view->blocks.size() == world) return view->blocks[static_cast<size_t>(rank)].count;
    }
    return cut_count();
  }

  // Chunks of a block.
  static int32_t parts_of(const VectorView& view, int32_t chunks) {
    const auto blocks = static_cast<int32_t>(view.blocks.size());
    return chunks == blocks ? 1 : chunks / blocks;
  }

  static bool in_vectors(Ref ref) {
    return ref.space == Space::input || ref.space == Space::output;
  }

  Place place(const VectorView& view, int32_t chunks, int32_t chunk) const {
    if (view.blocks.empty() || chunks == 0) return {};
    const int32_t parts = parts_of(view, chunks);
    // A whole block: most chunks of small operations are, and divisions are slow.
    if (parts == 1) {
      const Block& block = view.blocks[static_cast<size_t>(chunk)];
      return {block.data, {0, block.count}};
    }
    const Block& block = view.blocks[static_cast<size_t>(chunk / parts)];
    return {block.data, chunk_range(block.count, parts, chunk % parts, align_)};
  }

  uint64_t largest(const VectorView& view, int32_t chunks) const {
    uint64_t most = 0;
    // Chunks shrink towards the end of a block: the first of each is its largest.
    const int32_t parts = view.blocks.empty() ? 1 : parts_of(view, chunks);
    for (int32_t chunk = 0; chunk < chunks; chunk += parts) {
      most = std::max(most, place(view, chunks, chunk).range.size());
    }
    return most;
  }

  const Program& program_;
  const VectorView& input_;
  const VectorView& output_;
  uint64_t align_;
};

// Elements of the block that round `round` covers; empty past the end of the chunk.
inline ChunkRange slice_of(ChunkRange chunk, uint64_t round, uint64_t slice) {
  const uint64_t begin = std::min(chunk.begin + round * slice, chunk.end);
  return {begin, std::min(begin + slice, chunk.end)};
}

// Room of a slot where a slice of `slice` bytes is meant: over a network slices of large vectors
// may be four times as long, so that enough is on its way while a rank waits for an answer.
inline uint64_t slot_for(uint64_t slice) {
  return std::max(slice, std::min<uint64_t>(4 * slice, 1 << 20));
}

// Bytes of a slice over a network, for chunks of that many: still two rounds a FIFO.
inline uint64_t network_slice(uint64_t chunk_bytes, uint64_t slice) {
  return std::clamp(chunk_bytes / (2 * kMaxChannels) / 64 * 64, slice, slot_for(slice));
}

// At least one: operations on nothing still meet.
inline uint64_t round_count(uint64_t largest_chunk, uint64_t slice) {
  return std::max<uint64_t>(1, (largest_chunk + slice - 1) / slice);
}

}  // namespace pycoll
