// Collectives over codecs, against those of the same ranks on the CPU: vectors and residuals must
// be the same to the byte.
#include <cstring>

#include "core/error.h"
#include "group_call.h"
#include "kernels/reduce.h"
#include "runtime/codec_group.h"

namespace pycoll::sim::tests {
namespace {

constexpr DType kTypes[] = {DType::float32, DType::float16, DType::bfloat16};
constexpr Collective kCollectives[] = {Collective::all_reduce, Collective::reduce_scatter,
                                       Collective::all_gather, Collective::broadcast,
                                       Collective::all_to_all};

// Of magnitudes around 1, of any of the types.
Bytes draw_values(Rng& rng, DType dtype, uint64_t count) {
  Bytes bytes(count * size_of(dtype));
  for (uint64_t i = 0; i < count; ++i) {
    const auto wild = static_cast<float>(rng.below(20011)) / 10005.0f - 1.0f;
    uint32_t word = 0;
    std::memcpy(&word, &wild, sizeof(word));
    if (dtype == DType::bfloat16) word >>= 16;
    if (dtype == DType::float16) word = static_cast<uint32_t>(rng.next()) & 0xbbffu;
    std::memcpy(bytes.data() + i * size_of(dtype), &word, size_of(dtype));
  }
  return bytes;
}

// What every rank draws alike.
struct Drawn {
  CodecRequest call;              // without vectors
  std::vector<uint64_t> lengths;  // by rank; of an all_reduce and a broadcast the first counts
  bool residual;
  bool sum_residual;
  uint64_t seed;
};

Drawn draw(Rng& rng, int ranks) {
  Drawn drawn;
  CodecRequest& call = drawn.call;
  call.collective = kCollectives[rng.below(std::size(kCollectives))];
  if (rng.one_in(2)) call.collective = Collective::all_reduce;
  call.dtype = kTypes[rng.below(std::size(kTypes))];
  if (traits_of(call.collective).reduces) {
    call.reduce_op = rng.one_in(2) ? ReduceOp::sum : ReduceOp::avg;
  }
  call.codec.kind = static_cast<CodecKind>(rng.below(static_cast<uint64_t>(CodecKind::kCount)));
  call.codec.block = kLeastBlock << rng.below(8);
  call.codec.stochastic = traits_of(call.codec.kind).may_be_stochastic && rng.one_in(2);
  call.seed = rng.next();
  if (rng.one_in(2)) call.step = static_cast<uint32_t>(rng.next());
  call.root = static_cast<int>(rng.below(static_cast<uint64_t>(ranks)));
  if (!traits_of(call.collective).rooted) call.root = 0;
  // Some have chunks of several pieces.
  const uint64_t most = rng.one_in(12) ? 400000 : rng.one_in(3) ? 20000 : 1500;
  for (int r = 0; r < ranks; ++r) drawn.lengths.push_back(rng.one_in(5) ? 0 : rng.below(most));
  const bool whole = call.collective == Collective::all_reduce;
  drawn.residual = whole && rng.one_in(2);
  drawn.sum_residual = whole && rng.one_in(2);
  drawn.seed = rng.next();
  return drawn;
}

// A vector in both places.
class Twin {
 public:
  Twin(const Bytes& values, DType dtype, size_t offset)
      : host_(filled(values)),
        device_(host_, offset * size_of(dtype)),
        count_(values.size() / size_of(dtype)),
        dtype_(dtype) {}

  Block on_host() { return {host_.data(), count_}; }
  Block on_device() const { return {device_.image_of(host_.data()), count_}; }
  // Both have been computed.
  void check(const std::string& what) {
    const Bytes cpu = host_.contents();
    device_.download(what);
    const std::string differs = difference(dtype_, host_.contents(), cpu);
    sim::tests::check(differs.empty(), what + ": " + differs);
  }

 private:
  static Buffer filled(const Bytes& values) {
    Buffer buffer(values.size());
    buffer.fill(values);
    return buffer;
  }

  Buffer host_;
  OnDevice device_;
  uint64_t count_;
  DType dtype_;
};

class Call {
 public:
  Call(const Drawn& drawn, const GroupRank& rank) : on_device_(drawn.call), on_host_(drawn.call) {
    Rng own(drawn.seed * 977 + static_cast<uint64_t>(rank.rank));
    const auto self = static_cast<size_t>(rank.rank);
    const size_t offset = drawn.seed % 5;
    const auto add = [&](uint64_t count, VectorView CodecRequest::*view, DType dtype) {
      Twin& twin = *twins_.emplace_back(
          std::make_unique<Twin>(draw_values(own, dtype, count), dtype, offset));
      (on_device_.*view).blocks.push_back(twin.on_device());
      (on_host_.*view).blocks.push_back(twin.on_host());
    };
    const DType dtype = drawn.call.dtype;
    const auto all = [&](VectorView CodecRequest::*view) {
      for (const uint64_t length : drawn.lengths) add(length, view, dtype);
    };
    switch (drawn.call.collective) {
      case Collective::all_reduce:
      case Collective::broadcast:
        add(drawn.lengths[0], &CodecRequest::output, dtype);
        // In place: an input apart is the other collectives'.
        for (CodecRequest* request : {&on_device_, &on_host_}) {
          const bool reads = !traits_of(request->collective).rooted || rank.rank == request->root;
          if (reads) request->input = request->output;
        }
        break;
      case Collective::reduce_scatter:
        all(&CodecRequest::input);
        add(drawn.lengths[self], &CodecRequest::output, dtype);
        break;
      case Collective::all_gather:
        add(drawn.lengths[self], &CodecRequest::input, dtype);
        all(&CodecRequest::output);
        break;
      default:  // from s to r: the product of both
        for (const auto side : {&CodecRequest::input, &CodecRequest::output}) {
          for (const uint64_t length : drawn.lengths) {
            add(length * drawn.lengths[self] % 3000, side, dtype);
          }
        }
    }
    if (drawn.residual) add(drawn.lengths[0], &CodecRequest::residual, DType::float32);
    if (drawn.sum_residual) add(drawn.lengths[0], &CodecRequest::sum_residual, DType::float32);
  }

  const CodecRequest& on_device() const { return on_device_; }
  const CodecRequest& on_host() const { return on_host_; }
  std::string describe() const {
    const CodecRequest& call = on_device_;
    return concat(name_of(call.collective), " of ", name_of(call.dtype), " over ",
                  name_of(call.codec.kind), " in blocks of ", call.codec.block, ", ",
                  std::max(call.input.count(), call.output.count()), " elements");
  }
  void check(const std::string& what) {
    for (const auto& twin : twins_) twin->check(what + ": " + describe());
  }

 private:
  CodecRequest on_device_;
  CodecRequest on_host_;
  std::vector<std::unique_ptr<Twin>> twins_;
};

void run_codecs(GroupRank& rank, const GroupSettings& settings) {
  Rng agreed(rank.seed * 57 + 9);
  Rng own(rank.seed * 83 + static_cast<uint64_t>(rank.rank));
  const auto cpu = CodecGroup::make(rank.control);
  const std::vector<cudaStream_t> streams{new_stream(), new_stream()};
  for (uint64_t done = 0; done < settings.cases;) {
    std::vector<std::unique_ptr<Call>> calls;
    for (uint64_t in_flight = 1 + agreed.below(3); in_flight > 0; --in_flight, ++done) {
      calls.push_back(std::make_unique<Call>(draw(agreed, rank.ranks), rank));
    }
    OneCall exact(draw_call(agreed, rank.ranks), rank);
    rank.settle();
    for (const auto& call : calls) {
      rank.group->enqueue(call->on_device(), streams[own.below(streams.size())]);
    }
    rank.group->enqueue(exact.request(), streams[0]);
    for (const cudaStream_t stream : streams) wait_for_device(rank, stream);
    for (const auto& call : calls) cpu->submit(call->on_host())->wait(std::nullopt, nullptr);
    rank.settle();
    exact.check(rank.group->path());
    for (const auto& call : calls) call->check(rank.group->path());
  }
  rank.meeting.barrier();
}

}  // namespace

void codecs_suite(const GroupSettings& settings) {
  run_group(settings, [&](GroupRank& rank) { run_codecs(rank, settings); });
}

}  // namespace pycoll::sim::tests
