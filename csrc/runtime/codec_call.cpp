#include "runtime/codec_call.h"

#include <algorithm>

#include "runtime/float_mode.h"

namespace pycoll {
namespace {

// Values of a piece. Of a chunk there are some eight, so that encoding, the wire and decoding
// overlap; an operation costs as much as the wire takes for tens of thousands of values, and beyond
// a million codes leave the cache between encoding and sending.
constexpr uint64_t kPieces = 8;
constexpr uint64_t kLeastPiece = uint64_t{1} << 16;
constexpr uint64_t kMostPiece = uint64_t{1} << 20;

// Random numbers of a sum are others than those of this rank's values.
constexpr uint32_t kOfSums = 0x80000000u;

bool sums(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce_scatter;
}
bool exchanges(Collective collective) {
  return sums(collective) || collective == Collective::all_to_all;
}

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

// ---- Memory ----

BufferPool::Sized BufferPool::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto fits = std::find_if(kept_.begin(), kept_.end(), [bytes](const Sized& buffer) {
    return buffer.bytes >= bytes && buffer.bytes / 2 <= bytes;
  });
  if (fits == kept_.end()) return {Buffer(new std::byte[bytes]), bytes};
  Sized buffer = std::move(*fits);
  kept_.erase(fits);
  return buffer;
}

void BufferPool::give_back(Sized buffer) {
  if (fork_mark_.in_child()) return;
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(buffer));
  size_t bytes = 0;
  for (const Sized& kept : kept_) bytes += kept.bytes;
  while (kept_.size() > kMostKept || bytes > kMostBytes) {
    bytes -= kept_.front().bytes;
    kept_.erase(kept_.begin());
  }
}

// ---- The call ----

CodecCall::CodecCall(CodecRequest request, const CodecLanes& lanes, BufferPool& pool,
                     std::shared_ptr<CallHome> home)
    : CompressedCall(std::move(request), lanes.gather->rank(), std::move(home)),
      lanes_(lanes),
      pool_(pool),
      world_size_(lanes_.gather->world_size()),
      rank_(lanes_.gather->rank()) {
  plan();
}

CodecCall::~CodecCall() {
  if (memory_.memory) pool_.give_back(std::move(memory_));
}

std::vector<CodecCall::Part> CodecCall::chunks_of(const VectorView& vector,
                                                  const VectorView& residual) const {
  std::vector<Part> chunks;
  const auto residual_of = [&](size_t block) {
    return residual.blocks.empty() ? nullptr
                                   : reinterpret_cast<float*>(residual.blocks[block].data);
  };
  if (request().collective != Collective::all_reduce) {
    uint64_t first = request().first;
    for (size_t i = 0; i < vector.blocks.size(); ++i) {
      const Block& block = vector.blocks[i];
      chunks.push_back({block.data, first, block.count, residual_of(i)});
      first += whole_units(block.count);
    }
    return chunks;
  }
  const Block& whole = vector.blocks[0];
  float* const residuals = residual_of(0);
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto [begin, count] = share_of(whole.count, world_size_, rank);
    chunks.push_back({whole.data + begin * size_of(request().dtype), request().first + begin, count,
                      residuals == nullptr ? nullptr : residuals + begin});
  }
  return chunks;
}

void CodecCall::lay_out(Area& area, uint64_t count, uint64_t& bytes) const {
  const uint64_t slot = code_bytes(request().codec, std::min(count, piece_count_));
  area.begin.push_back(bytes);
  area.slot.push_back(slot);
  bytes += slot * pieces_;
}

void CodecCall::plan() {
  over_ = {wire_tag(request().codec),
           pack_call(request().collective, request().dtype, request().reduce_op, request().root),
           // The call has room for the lower bits of a root.
           hash_lengths(request()) ^ static_cast<uint32_t>(request().root >> 8) * 0x9e3779b9u};
  input_ = chunks_of(request().input, request().residual);
  output_ = chunks_of(request().output, request().sum_residual);
  uint64_t longest = 0;
  for (const Part& chunk : input_) longest = std::max(longest, chunk.count);
  for (const Part& chunk : output_) longest = std::max(longest, chunk.count);
  // Ranks know only their own lengths of an all_to_all: one piece, or they would cut differently.
  const bool cut = request().collective != Collective::all_to_all;
  const uint64_t piece = cut ? std::clamp(longest / kPieces, kLeastPiece, kMostPiece) : longest;
  piece_count_ = whole_units(std::max<uint64_t>(std::min(piece, longest), 1));
  pieces_ =
      static_cast<uint32_t>(std::max<uint64_t>((longest + piece_count_ - 1) / piece_count_, 1));

  const bool first = exchanges(request().collective);
  uint64_t bytes = 0;
  if (first) {
    for (const Part& chunk : input_) lay_out(sent_, chunk.count, bytes);
    for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
      lay_out(received_, received_from(peer).count, bytes);
    }
  }
  if (!first || request().collective == Collective::all_reduce) {
    for (const Part& chunk : output_) lay_out(gathered_, chunk.count, bytes);
  }
  memory_ = pool_.take(bytes + 1);
  for (Area* area : {&sent_, &received_, &gathered_}) area->data = memory_.memory.get();
  if (request().collective == Collective::all_reduce) sum_.resize(piece_count_);
}

// What a peer's codes of the first lane are of.
const CodecCall::Part& CodecCall::received_from(size_t peer) const {
  const auto self = static_cast<size_t>(rank_);
  if (request().collective == Collective::reduce_scatter) return output_[0];
  return request().collective == Collective::all_reduce ? input_[self] : output_[peer];
}

CodecCall::Part CodecCall::piece_of(const Part& chunk, uint32_t piece) const {
  const uint64_t begin = std::min(piece * piece_count_, chunk.count);
  const uint64_t end = std::min(begin + piece_count_, chunk.count);
  return {chunk.data + begin * size_of(request().dtype), chunk.first + begin, end - begin,
          chunk.residual == nullptr ? nullptr : chunk.residual + begin};
}

void CodecCall::encode(const Part& part, std::byte* code) const {
  const IeeeFloatMode ieee;
  const RandomKey key{request().seed, *request().step, static_cast<uint32_t>(rank_), part.first};
  codec_kernels(best_isa())
      .encode({request().codec, key, request().dtype, part.data, part.count, code, part.residual});
}

void CodecCall::encode_sum(const Part& part, const float* sum, std::byte* code) const {
  const IeeeFloatMode ieee;
  const RandomKey key{request().seed, *request().step, static_cast<uint32_t>(rank_) | kOfSums,
                      part.first};
  codec_kernels(best_isa())
      .encode({request().codec, key, DType::float32, sum, part.count, code, part.residual});
}

void CodecCall::decode(const std::vector<const std::byte*>& codes, const Part& part, void* values,
                       DType dtype, float divisor) const {
  const IeeeFloatMode ieee;
  codec_kernels(best_isa())
      .decode({request().codec, codes.data(), codes.size(), dtype, values, part.count, divisor});
}

// ---- Under way ----

void CodecCall::begin() {
  for (uint32_t piece = 0; piece < pieces_; ++piece) {
    if (exchanges(request().collective)) {
      start_exchange(piece);
    } else {
      start_gather(piece);
    }
  }
}

void CodecCall::start_exchange(uint32_t piece) {
  CallRequest call;
  call.collective = Collective::all_to_all;
  call.over = over_;
  const auto self = static_cast<size_t>(rank_);
  for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
    const Part part = piece_of(input_[peer], piece);
    std::byte* code = slot(sent_, peer, piece);
    encode(part, code);
    // This rank's own codes stay where they are.
    call.input.blocks.push_back({code, peer == self ? 0 : bytes_of(part)});
    const Part mine = piece_of(received_from(peer), piece);
    call.output.blocks.push_back({slot(received_, peer, piece), peer == self ? 0 : bytes_of(mine)});
  }
  submit(*lanes_.exchange, std::move(call), [this, piece] { after_exchange(piece); });
}

void CodecCall::after_exchange(uint32_t piece) {
  if (sums(request().collective)) return sum_own(piece);
  for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
    const bool own = peer == static_cast<size_t>(rank_);
    const Part part = piece_of(output_[peer], piece);
    decode({slot(own ? sent_ : received_, peer, piece)}, part, part.data, request().dtype, 1);
  }
}

void CodecCall::sum_own(uint32_t piece) {
  const auto self = static_cast<size_t>(rank_);
  std::vector<const std::byte*> codes;
  for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
    codes.push_back(slot(peer == self ? sent_ : received_, peer, piece));
  }
  const float divisor =
      request().reduce_op == ReduceOp::avg ? static_cast<float>(world_size_) : 1.0f;
  if (request().collective == Collective::reduce_scatter) {
    const Part part = piece_of(output_[0], piece);
    return decode(codes, part, part.data, request().dtype, divisor);
  }
  const Part part = piece_of(output_[self], piece);
  decode(codes, part, sum_.data(), DType::float32, divisor);
  encode_sum(part, sum_.data(), slot(gathered_, self, piece));
  start_gather(piece);
}

void CodecCall::start_gather(uint32_t piece) {
  CallRequest call;
  call.over = over_;
  const auto self = static_cast<size_t>(rank_);
  if (request().collective == Collective::broadcast) {
    const Part part = piece_of(output_[0], piece);
    std::byte* code = slot(gathered_, 0, piece);
    call.collective = Collective::broadcast;
    call.root = request().root;
    if (rank_ == request().root) {
      encode(piece_of(input_[0], piece), code);
      call.input.blocks.push_back({code, bytes_of(part)});
    }
    call.output.blocks.push_back({code, bytes_of(part)});
  } else {
    call.collective = Collective::all_gather;
    for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
      call.output.blocks.push_back(
          {slot(gathered_, peer, piece), bytes_of(piece_of(output_[peer], piece))});
    }
    const Block& mine = call.output.blocks[self];
    if (request().collective == Collective::all_gather) {
      Part from = piece_of(input_[0], piece);
      from.first = piece_of(output_[self], piece).first;
      encode(from, mine.data);
    }
    call.input.blocks.push_back(mine);
  }
  Communicator& lane = exchanges(request().collective) ? *lanes_.gather : *lanes_.exchange;
  submit(lane, std::move(call), [this, piece] { after_gather(piece); });
}

void CodecCall::after_gather(uint32_t piece) {
  for (size_t chunk = 0; chunk < output_.size(); ++chunk) {
    const Part part = piece_of(output_[chunk], piece);
    decode({slot(gathered_, chunk, piece)}, part, part.data, request().dtype, 1);
  }
  if (piece + 1 == pieces_ && request().in_order) request().in_order();
}

}  // namespace pycoll
