#include "runtime/codec_call.h"

#include <algorithm>

#include "runtime/float_mode.h"

namespace pycoll {

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
      rank_(lanes_.gather->rank()),
      layout_(this->request(), world_size_, rank_),
      over_(over_of(this->request())) {
  plan();
}

// The home is alive: one that never began, or was not begun to the end, has not let go of it.
CodecCall::~CodecCall() {
  if (memory_.memory) pool_.give_back(std::move(memory_));
}

void CodecCall::settle() {
  pool_.give_back(std::move(memory_));
  lanes_ = {};
}

void CodecCall::lay_out(Area& area, const Part& chunk, uint64_t& bytes) const {
  const uint64_t slot = layout_.slot_bytes(chunk);
  area.begin.push_back(bytes);
  area.slot.push_back(slot);
  bytes += slot * layout_.pieces();
}

void CodecCall::plan() {
  const bool first = exchanges(request().collective);
  uint64_t bytes = 0;
  if (first) {
    for (const Part& chunk : layout_.input()) lay_out(sent_, chunk, bytes);
    for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
      lay_out(received_, layout_.received_from(peer), bytes);
    }
  }
  if (!first || request().collective == Collective::all_reduce) {
    for (const Part& chunk : layout_.output()) lay_out(gathered_, chunk, bytes);
  }
  memory_ = pool_.take(bytes + 1);
  for (Area* area : {&sent_, &received_, &gathered_}) area->data = memory_.memory.get();
  if (request().collective == Collective::all_reduce) sum_.resize(layout_.piece_count());
}

void CodecCall::encode(const Part& part, std::byte* code) const {
  const IeeeFloatMode ieee;
  RandomKey key = key_of_values(request(), rank_);
  key.first = part.first;
  codec_kernels(best_isa())
      .encode({request().codec, key, request().dtype, part.data, part.count, code, part.residual});
}

void CodecCall::encode_sum(const Part& part, const float* sum, std::byte* code) const {
  const IeeeFloatMode ieee;
  RandomKey key = key_of_sums(request(), rank_);
  key.first = part.first;
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
  for (uint32_t piece = 0; piece < layout_.pieces(); ++piece) {
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
    const Part part = layout_.piece_of(layout_.input()[peer], piece);
    std::byte* code = slot(sent_, peer, piece);
    encode(part, code);
    // This rank's own codes stay where they are.
    call.input.blocks.push_back({code, peer == self ? 0 : bytes_of(part)});
    const Part mine = layout_.piece_of(layout_.received_from(peer), piece);
    call.output.blocks.push_back({slot(received_, peer, piece), peer == self ? 0 : bytes_of(mine)});
  }
  submit(*lanes_.exchange, std::move(call), [this, piece] { after_exchange(piece); });
}

void CodecCall::after_exchange(uint32_t piece) {
  if (sums(request().collective)) return sum_own(piece);
  for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
    const bool own = peer == static_cast<size_t>(rank_);
    const Part part = layout_.piece_of(layout_.output()[peer], piece);
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
    const Part part = layout_.piece_of(layout_.output()[0], piece);
    return decode(codes, part, part.data, request().dtype, divisor);
  }
  const Part part = layout_.piece_of(layout_.output()[self], piece);
  decode(codes, part, sum_.data(), DType::float32, divisor);
  encode_sum(part, sum_.data(), slot(gathered_, self, piece));
  start_gather(piece);
}

void CodecCall::start_gather(uint32_t piece) {
  CallRequest call;
  call.over = over_;
  const auto self = static_cast<size_t>(rank_);
  if (request().collective == Collective::broadcast) {
    const Part part = layout_.piece_of(layout_.output()[0], piece);
    std::byte* code = slot(gathered_, 0, piece);
    call.collective = Collective::broadcast;
    call.root = request().root;
    if (rank_ == request().root) {
      encode(layout_.piece_of(layout_.input()[0], piece), code);
      call.input.blocks.push_back({code, bytes_of(part)});
    }
    call.output.blocks.push_back({code, bytes_of(part)});
  } else {
    call.collective = Collective::all_gather;
    for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
      call.output.blocks.push_back({slot(gathered_, peer, piece),
                                    bytes_of(layout_.piece_of(layout_.output()[peer], piece))});
    }
    const Block& mine = call.output.blocks[self];
    if (request().collective == Collective::all_gather) {
      Part from = layout_.piece_of(layout_.input()[0], piece);
      from.first = layout_.piece_of(layout_.output()[self], piece).first;
      encode(from, mine.data);
    }
    call.input.blocks.push_back(mine);
  }
  Communicator& lane = exchanges(request().collective) ? *lanes_.gather : *lanes_.exchange;
  submit(lane, std::move(call), [this, piece] { after_gather(piece); });
}

void CodecCall::after_gather(uint32_t piece) {
  for (size_t chunk = 0; chunk < layout_.output().size(); ++chunk) {
    const Part part = layout_.piece_of(layout_.output()[chunk], piece);
    decode({slot(gathered_, chunk, piece)}, part, part.data, request().dtype, 1);
  }
  if (piece + 1 == layout_.pieces() && request().in_order) request().in_order();
}

}  // namespace pycoll
