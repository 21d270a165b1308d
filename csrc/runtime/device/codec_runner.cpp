#include "runtime/device/codec_runner.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "kernels/cuda/kernels.h"
#include "runtime/codec_layout.h"

namespace pycoll::cuda {
namespace {

using Part = CodecLayout::Part;

constexpr size_t kAlign = 256;
// Bytes of float32 sums at a time, as a multiple of what one call carries: values of few bits would
// have many times as much.
constexpr uint64_t kSumPortions = 4;

// ---- Many vectors, as few launches as there can be. ----

class EncodeList {
 public:
  EncodeList(const Codec& codec, const RandomKey& key, DType dtype, cudaStream_t stream)
      : stream_(stream) {
    call_.codec = codec;
    call_.key = key;
    call_.dtype = dtype;
  }
  void add(const void* values, const Part& part, std::byte* code) {
    if (part.count == 0) return;
    if (call_.vectors == kMaxVectors) launch();
    call_.vector[call_.vectors++] = {values, part.count, code, part.residual, part.first};
  }
  void launch() {
    if (call_.vectors > 0) require(encode_many(call_, stream_), "launching an encoder");
    call_.vectors = 0;
  }

 private:
  EncodeManyCall call_;
  cudaStream_t stream_;
};

class DecodeList {
 public:
  // Each vector is the sum of so many codes, divided.
  struct Sum {
    int32_t codes = 1;
    float divisor = 1;
  };
  DecodeList(const Codec& codec, DType dtype, const Sum& sum, cudaStream_t stream)
      : stream_(stream) {
    call_.codec = codec;
    call_.dtype = dtype;
    call_.codes = sum.codes;
    call_.divisor = sum.divisor;
  }
  // `code_of(i)`: the i-th code.
  template <class CodeOf>
  void add(void* values, uint64_t count, const CodeOf& code_of) {
    if (count == 0) return;
    if (call_.vectors == std::min(kMaxVectors, kMaxCodes / call_.codes)) launch();
    for (int32_t i = 0; i < call_.codes; ++i) {
      call_.code[call_.vectors * call_.codes + i] = code_of(i);
    }
    call_.vector[call_.vectors++] = {values, count};
  }
  void launch() {
    if (call_.vectors > 0) require(decode_many(call_, stream_), "launching a decoder");
    call_.vectors = 0;
  }

 private:
  DecodeManyCall call_;
  cudaStream_t stream_;
};

// ---- One call, cut. ----

// Pieces [first, end) of every chunk.
struct Portion {
  uint32_t first;
  uint32_t end;
};

// Codes of a portion, in this order.
struct Area {
  VectorView sent;      // by chunk
  VectorView received;  // by rank, none of this one
  VectorView gathered;  // by chunk
};

class CutCall {
 public:
  CutCall(const CodecRequest& request, const CodeCarrier& carrier)
      : request_(request),
        world_size_(carrier.world_size()),
        rank_(static_cast<size_t>(carrier.rank())),
        layout_(request, carrier.world_size(), carrier.rank()),
        over_(over_of(request)) {
    // The same on all ranks: of an all_to_all there is one piece.
    const uint64_t piece =
        code_bytes(request.codec, std::min(layout_.longest(), layout_.piece_count()));
    const uint64_t codes = std::max<uint64_t>(piece * static_cast<uint64_t>(world_size_), 1);
    const uint64_t all = std::max(codes, piece_sum_bytes() / kSumPortions);
    pieces_ =
        static_cast<uint32_t>(std::clamp<uint64_t>(carrier.portion() / all, 1, layout_.pieces()));
  }

  std::vector<Portion> portions() const {
    std::vector<Portion> portions;
    for (uint32_t first = 0; first < layout_.pieces(); first += pieces_) {
      portions.push_back({first, std::min(first + pieces_, layout_.pieces())});
    }
    return portions;
  }

  // Of an area that has room for any portion.
  size_t area_bytes() const {
    uintptr_t at = 0;
    lay_out({0, pieces_}, at);
    return at;
  }

  // Of the values that the owner of a chunk encodes, for any portion.
  size_t sum_bytes() const { return pieces_ * piece_sum_bytes(); }

  // Stage 0 of each; a call that only gathers has stages 0 and 1. What is to be carried then.
  CallRequest encode(const Portion& portion, const Area& area, cudaStream_t stream) const;
  // Stage 1, when that was carried; what is next, if anything. `sums`: free again after it.
  std::optional<CallRequest> combine(const Portion& portion, const Area& area, float* sums,
                                     cudaStream_t stream) const;
  // Stage 2 of an all_reduce.
  void decode(const Portion& portion, const Area& area, cudaStream_t stream) const;

  bool sums_whole() const { return request_.collective == Collective::all_reduce; }
  // From the address `at` on, which becomes the end.
  Area lay_out(const Portion& portion, uintptr_t& at) const;

 private:
  size_t piece_sum_bytes() const {
    return sums_whole() ? layout_.piece_count() * sizeof(float) : 0;
  }
  CallRequest carried(Collective collective) const;
  CallRequest exchange_of(const Area& area) const;
  CallRequest gather_of(const Area& area) const;
  Block take(const Part& chunk, const Portion& portion, uintptr_t& at) const;
  std::byte* code_of(const Block& block, const Part& chunk, const Portion& portion,
                     uint32_t piece) const {
    return block.data + (piece - portion.first) * layout_.slot_bytes(chunk);
  }
  const Block& codes_from(const Area& area, size_t peer) const {
    return (peer == rank_ ? area.sent : area.received).blocks[peer];
  }
  template <class Visit>
  void for_each_piece(const Portion& portion, const Visit& visit) const {
    for (uint32_t piece = portion.first; piece < portion.end; ++piece) visit(piece);
  }
  void sum(const Portion& portion, const Area& area, float* sums, cudaStream_t stream) const;
  void encode_sum(const Portion& portion, const Area& area, const float* sums,
                  cudaStream_t stream) const;
  void decode_exchanged(const Portion& portion, const Area& area, cudaStream_t stream) const;

  const CodecRequest& request_;
  const int world_size_;
  const size_t rank_;
  const CodecLayout layout_;
  const OverCodec over_;
  uint32_t pieces_ = 1;  // of a portion
};

// The codes of a chunk's pieces lie one after the other, and so do those of chunks: only the last
// piece of a chunk is shorter than the others.
Block CutCall::take(const Part& chunk, const Portion& portion, uintptr_t& at) const {
  Block block{reinterpret_cast<std::byte*>(at), 0};
  for_each_piece(portion, [&](uint32_t piece) {
    block.count += code_bytes(request_.codec, layout_.piece_of(chunk, piece).count);
  });
  at += block.count;
  return block;
}

Area CutCall::lay_out(const Portion& portion, uintptr_t& at) const {
  Area area;
  const auto align = [&at] { at = (at + kAlign - 1) / kAlign * kAlign; };
  if (exchanges(request_.collective)) {
    for (const Part& chunk : layout_.input()) {
      area.sent.blocks.push_back(take(chunk, portion, at));
    }
    align();
    for (size_t peer = 0; peer < static_cast<size_t>(world_size_); ++peer) {
      const Part none{};
      const Part& chunk = peer == rank_ ? none : layout_.received_from(peer);
      area.received.blocks.push_back(take(chunk, portion, at));
    }
    align();
  }
  if (sums_whole() || !exchanges(request_.collective)) {
    for (const Part& chunk : layout_.output()) {
      area.gathered.blocks.push_back(take(chunk, portion, at));
    }
    align();
  }
  return area;
}

CallRequest CutCall::carried(Collective collective) const {
  CallRequest call;
  call.timeout = request_.timeout;
  call.collective = collective;
  call.over = over_;
  return call;
}

CallRequest CutCall::exchange_of(const Area& area) const {
  CallRequest call = carried(Collective::all_to_all);
  call.input = area.sent;
  call.input.blocks[rank_].count = 0;  // they stay
  call.output = area.received;
  return call;
}

CallRequest CutCall::gather_of(const Area& area) const {
  const bool from_root = request_.collective == Collective::broadcast;
  CallRequest call = carried(from_root ? Collective::broadcast : Collective::all_gather);
  call.root = request_.root;
  call.output = area.gathered;
  if (!from_root) call.input.blocks.push_back(area.gathered.blocks[rank_]);
  if (from_root && static_cast<size_t>(request_.root) == rank_) call.input = area.gathered;
  return call;
}

CallRequest CutCall::encode(const Portion& portion, const Area& area, cudaStream_t stream) const {
  const RandomKey key = key_of_values(request_, static_cast<int>(rank_));
  EncodeList list(request_.codec, key, request_.dtype, stream);
  const auto add = [&](Part part, std::byte* code) { list.add(part.data, part, code); };
  const bool first = exchanges(request_.collective);
  const bool from_root = request_.collective == Collective::broadcast;
  for_each_piece(portion, [&](uint32_t piece) {
    if (first) {
      for (size_t peer = 0; peer < area.sent.blocks.size(); ++peer) {
        const Part& chunk = layout_.input()[peer];
        add(layout_.piece_of(chunk, piece), code_of(area.sent.blocks[peer], chunk, portion, piece));
      }
    } else if (!from_root || static_cast<size_t>(request_.root) == rank_) {
      const size_t place = from_root ? 0 : rank_;
      const Part& chunk = layout_.output()[place];
      Part part = layout_.piece_of(layout_.input()[0], piece);
      if (!from_root) part.first = layout_.piece_of(chunk, piece).first;
      add(part, code_of(area.gathered.blocks[place], chunk, portion, piece));
    }
  });
  list.launch();
  return first ? exchange_of(area) : gather_of(area);
}

std::optional<CallRequest> CutCall::combine(const Portion& portion, const Area& area, float* sums,
                                            cudaStream_t stream) const {
  if (!exchanges(request_.collective)) {
    decode(portion, area, stream);
    return std::nullopt;
  }
  if (!pycoll::sums(request_.collective)) {
    decode_exchanged(portion, area, stream);
    return std::nullopt;
  }
  sum(portion, area, sums, stream);
  if (!sums_whole()) return std::nullopt;
  encode_sum(portion, area, sums, stream);
  return gather_of(area);
}

// Into the output, or, where the sum is encoded again, into `sums`.
void CutCall::sum(const Portion& portion, const Area& area, float* sums,
                  cudaStream_t stream) const {
  const bool average = request_.reduce_op == ReduceOp::avg;
  const DecodeList::Sum how{world_size_, average ? static_cast<float>(world_size_) : 1.0f};
  DecodeList list(request_.codec, sums_whole() ? DType::float32 : request_.dtype, how, stream);
  const Part& chunk = layout_.output()[sums_whole() ? rank_ : 0];
  for_each_piece(portion, [&](uint32_t piece) {
    const Part part = layout_.piece_of(chunk, piece);
    void* const to =
        sums_whole() ? static_cast<void*>(sums + (piece - portion.first) * layout_.piece_count())
                     : part.data;
    list.add(to, part.count, [&](int32_t peer) {
      return code_of(codes_from(area, static_cast<size_t>(peer)), chunk, portion, piece);
    });
  });
  list.launch();
}

void CutCall::encode_sum(const Portion& portion, const Area& area, const float* sums,
                         cudaStream_t stream) const {
  const RandomKey key = key_of_sums(request_, static_cast<int>(rank_));
  EncodeList list(request_.codec, key, DType::float32, stream);
  const Part& chunk = layout_.output()[rank_];
  for_each_piece(portion, [&](uint32_t piece) {
    const float* const values = sums + (piece - portion.first) * layout_.piece_count();
    list.add(values, layout_.piece_of(chunk, piece),
             code_of(area.gathered.blocks[rank_], chunk, portion, piece));
  });
  list.launch();
}

void CutCall::decode_exchanged(const Portion& portion, const Area& area,
                               cudaStream_t stream) const {
  DecodeList list(request_.codec, request_.dtype, {}, stream);
  for_each_piece(portion, [&](uint32_t piece) {
    for (size_t peer = 0; peer < layout_.output().size(); ++peer) {
      const Part& chunk = layout_.output()[peer];
      const Part part = layout_.piece_of(chunk, piece);
      std::byte* const code = code_of(codes_from(area, peer), chunk, portion, piece);
      list.add(part.data, part.count, [&](int32_t) { return code; });
    }
  });
  list.launch();
}

void CutCall::decode(const Portion& portion, const Area& area, cudaStream_t stream) const {
  DecodeList list(request_.codec, request_.dtype, {}, stream);
  for_each_piece(portion, [&](uint32_t piece) {
    for (size_t place = 0; place < layout_.output().size(); ++place) {
      const Part& chunk = layout_.output()[place];
      const Part part = layout_.piece_of(chunk, piece);
      std::byte* const code = code_of(area.gathered.blocks[place], chunk, portion, piece);
      list.add(part.data, part.count, [&](int32_t) { return code; });
    }
  });
  list.launch();
}

}  // namespace

void CodecRunner::check(Collective collective, int ranks) {
  if (!sums(collective) || ranks <= kMaxCodes) return;
  fail(ErrorKind::not_implemented, name_of(collective), " over a codec on GPUs sums the codes of ",
       ranks, " ranks; up to ", kMaxCodes, " can be: call it without a codec, or on CPU memory");
}

// A portion is carried for so many portions' time before the stream waits for it, twice: calls that
// gather have the slots of the upper half.
void CodecRunner::run(const std::vector<CodecRequest>& calls, CodeCarrier& carrier,
                      cudaStream_t stream) {
  struct Job {
    const CutCall* call;
    Portion portion;
    Area area{};
  };
  std::vector<CutCall> cut;
  cut.reserve(calls.size());
  std::vector<Job> jobs;
  size_t area_bytes = kAlign, sum_bytes = 0;
  for (const CodecRequest& call : calls) {
    check(call.collective, carrier.world_size());
    const CutCall& one = cut.emplace_back(call, carrier);
    for (const Portion& portion : one.portions()) jobs.push_back({&one, portion});
    area_bytes = std::max(area_bytes, one.area_bytes());
    sum_bytes = std::max(sum_bytes, one.sum_bytes());
  }
  const size_t half = carrier.slots() / 2, behind = half - 1;
  const size_t areas = std::min(jobs.size(), 2 * behind + 1);
  std::byte* const memory = scratch_.room(areas * area_bytes + sum_bytes);
  auto* const sums = reinterpret_cast<float*>(memory + areas * area_bytes);
  for (size_t now = 0; now < jobs.size() + 2 * behind; ++now) {
    if (now < jobs.size()) {
      Job& job = jobs[now];
      uintptr_t at = reinterpret_cast<uintptr_t>(memory) + now % areas * area_bytes;
      job.area = job.call->lay_out(job.portion, at);
      carrier.begin(now % half, job.call->encode(job.portion, job.area, stream), stream);
    }
    if (now >= behind && now - behind < jobs.size()) {
      const Job& job = jobs[now - behind];
      const size_t slot = (now - behind) % half;
      carrier.end(slot, stream);
      if (const auto next = job.call->combine(job.portion, job.area, sums, stream)) {
        carrier.begin(half + slot, *next, stream);
      }
    }
    if (now >= 2 * behind && now - 2 * behind < jobs.size()) {
      const Job& job = jobs[now - 2 * behind];
      if (job.call->sums_whole()) {
        carrier.end(half + (now - 2 * behind) % half, stream);
        job.call->decode(job.portion, job.area, stream);
      }
    }
  }
}

}  // namespace pycoll::cuda
