// One collective whose data travels as codes.
//
// A vector of each rank's chunk is cut into pieces, so that encoding, the wire and decoding
// overlap. A piece passes through two lanes, communicators of the same ranks that serve nothing
// else:
//
//   exchange   all_to_all of codes: every rank gets all codes of its own chunk. It sums what they
//              decode to, in float32 and in the order of ranks, and encodes the sum once.
//   gather     all_gather of those codes. All ranks, the owner too, decode the same bytes: so all
//              end with the same bits, after two quantisations whatever the number of ranks.
//
// All else is over after the first lane, with one quantisation: reduce_scatter and all_to_all are
// its first half, all_gather and broadcast have their codes gathered there.
//
// Whatever callers begin enters the first lane, in the order of the calls: an all_gather and a
// broadcast, too. Nothing enters the second but from completions of the first, which come in that
// order: so both lanes have one order on all ranks.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/fork_mark.h"
#include "runtime/codec_layout.h"
#include "runtime/compressed_call.h"

namespace pycoll {

struct CodecLanes {
  std::shared_ptr<Communicator> exchange;
  std::shared_ptr<Communicator> gather;
};

// Memory of ended calls, for the next ones: pages that were touched already.
class BufferPool {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;
  struct Sized {
    Buffer memory;
    size_t bytes = 0;
  };
  // Of `bytes` at least, not initialised.
  Sized take(size_t bytes);
  // In a forked child it is not kept: a thread of the parent may hold the lock.
  void give_back(Sized buffer);

 private:
  static constexpr size_t kMostKept = 4;
  static constexpr size_t kMostBytes = size_t{1} << 28;  // of all that are kept

  const ForkMark fork_mark_;
  std::mutex mutex_;
  std::vector<Sized> kept_;  // guarded by mutex_
};

class CodecCall final : public CompressedCall {
 public:
  // The pool is the home's.
  CodecCall(CodecRequest request, const CodecLanes& lanes, BufferPool& pool,
            std::shared_ptr<CallHome> home);
  ~CodecCall() override;

 private:
  using Part = CodecLayout::Part;
  // Codes of chunks, piece by piece. The pieces of a chunk have slots of one size.
  struct Area {
    std::byte* data = nullptr;
    std::vector<uint64_t> begin{};
    std::vector<uint64_t> slot{};  // bytes
  };

  void begin() override;
  void settle() override;
  void plan();
  // Appends a chunk; `bytes` is the end of what is laid out.
  void lay_out(Area& area, const Part& chunk, uint64_t& bytes) const;
  static std::byte* slot(const Area& area, size_t chunk, uint32_t piece) {
    return area.data + area.begin[chunk] + piece * area.slot[chunk];
  }
  uint64_t bytes_of(const Part& part) const { return code_bytes(request().codec, part.count); }

  // Of a part's own values, or of others in its place.
  void encode(const Part& part, std::byte* code) const;
  void encode_sum(const Part& part, const float* sum, std::byte* code) const;
  void decode(const std::vector<const std::byte*>& codes, const Part& part, void* values,
              DType dtype, float divisor) const;

  void start_exchange(uint32_t piece);
  void start_gather(uint32_t piece);
  void after_exchange(uint32_t piece);
  void after_gather(uint32_t piece);
  void sum_own(uint32_t piece);

  CodecLanes lanes_;
  BufferPool& pool_;
  const int world_size_;
  const int rank_;

  const CodecLayout layout_;
  const OverCodec over_;
  BufferPool::Sized memory_;
  Area sent_;               // codes of this rank's values, by chunk
  Area received_;           // codes of this rank's chunk (of all_to_all: for it), by rank
  Area gathered_;           // codes of results, by chunk
  std::vector<float> sum_;  // of a piece; used by the thread that drives the first lane
};

}  // namespace pycoll
