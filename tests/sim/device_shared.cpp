// Kernels of ranks that share a GPU: they wait for nobody, and the host says when each may run.
#include <array>
#include <deque>

#include "device_batch.h"

namespace pycoll::sim::tests {
namespace {

struct Pair {
  DType dtype;
  ReduceOp op;
};

const std::vector<Pair>& all_pairs() {
  static const std::vector<Pair> pairs = [] {
    std::vector<Pair> some;
    for (int d = 0; d < static_cast<int>(DType::kCount); ++d) {
      for (int o = 0; o < static_cast<int>(ReduceOp::kCount); ++o) {
        const Pair pair{static_cast<DType>(d), static_cast<ReduceOp>(o)};
        const bool defined = find_reduce_kernels(pair.dtype, pair.op, Isa::baseline) != nullptr;
        check(defined == cuda::can_reduce(pair.dtype, pair.op),
              std::string("CPU and GPU disagree on ") + std::string(name_of(pair.dtype)) + " " +
                  std::string(name_of(pair.op)));
        if (defined) some.push_back(pair);
      }
    }
    return some;
  }();
  return pairs;
}

// Where vectors lie, told to kernels in the ways that there are.
class PlaceTables {
 public:
  explicit PlaceTables(Rng& rng) : rng_(rng) {}

  cuda::PeerPlace of(std::byte* address) {
    cuda::PeerPlace place;
    place.staged = address;
    if (rng_.one_in(4)) return place;  // it has no word
    words_.push_back(0);
    place.word = &words_.back();
    if (rng_.one_in(4)) return place;  // which says nothing
    const uint64_t slot = rng_.below(cuda::kPlaceSlots), offset = rng_.below(1000);
    place.offset = rng_.below(1000);
    place.staged = nullptr;
    tables_.emplace_back();
    place.table = tables_.back().data();
    tables_.back()[slot] = reinterpret_cast<uint64_t>(address) - offset - place.offset;
    words_.back() = cuda::place_word(slot, offset);
    return place;
  }

 private:
  Rng& rng_;
  std::deque<uint64_t> words_;
  std::deque<std::array<uint64_t, cuda::kPlaceSlots>> tables_;
};

cudaError_t launch_reduce(const CallData& data, int32_t rank, int32_t world_size,
                          PlaceTables* places, const uint32_t* given_up, cudaStream_t stream) {
  const CallShape& shape = data.shape();
  const ChunkRange part = chunk_range(shape.count, world_size, rank, 4);
  const auto fill = [&](auto call, const auto& input, const auto& output) {
    call.arithmetic = {shape.dtype, shape.op, world_size};
    call.sources = call.targets = world_size;
    call.begin = part.begin;
    call.end = part.end;
    for (int32_t peer = 0; peer < world_size; ++peer) {
      input(call, peer, static_cast<std::byte*>(data.input(peer).block[0]));
      output(call, peer, static_cast<std::byte*>(data.output(peer).block[0]));
    }
    return call;
  };
  if (places == nullptr) {
    return cuda::reduce_many(
        fill(
            cuda::ReduceManyCall{},
            [](auto& call, int32_t peer, std::byte* at) { call.input[peer] = at; },
            [](auto& call, int32_t peer, std::byte* at) { call.output[peer] = at; }),
        stream);
  }
  cuda::ReducePlacesCall start;
  start.given_up = given_up;
  return cuda::reduce_places(
      fill(
          start,
          [&](auto& call, int32_t peer, std::byte* at) { call.input[peer] = places->of(at); },
          [&](auto& call, int32_t peer, std::byte* at) { call.output[peer] = places->of(at); }),
      stream);
}

cudaError_t launch_gather(const CallData& data, int32_t rank, int32_t world_size,
                          PlaceTables* places, const uint32_t* given_up, cudaStream_t stream) {
  const cuda::Vector output = data.output(rank);
  cuda::CopyManyCall many;
  cuda::CopyPlacesCall placed;
  placed.given_up = given_up;
  many.copies = placed.copies = world_size;
  for (int32_t peer = 0; peer < world_size; ++peer) {
    const cuda::Vector input = data.input(peer);
    many.dst[peer] = placed.dst[peer] = output.block[peer];
    many.bytes[peer] = placed.bytes[peer] = input.count[0] * size_of(data.shape().dtype);
    many.src[peer] = input.block[0];
    if (places != nullptr) placed.src[peer] = places->of(static_cast<std::byte*>(input.block[0]));
  }
  return places != nullptr ? cuda::copy_places(placed, stream) : cuda::copy_many(many, stream);
}

// As the host orders it: what every rank reads is there, and nobody touches it meanwhile.
void check_shared(DeviceGroup& group, const CallShape& shape, bool use_places, Rng& rng,
                  decltype(&launch_reduce) launch, const char* name) {
  const CallData data(shape, group.world_size());
  PlaceTables tables(rng);
  PlaceTables* const places = use_places ? &tables : nullptr;
  // A group that was given up while its kernels waited for their turn.
  const uint32_t given_up = use_places && rng.one_in(12) ? 1 : 0;
  for (int32_t rank = 0; rank < group.world_size(); ++rank) {
    const cudaStream_t stream = group.stream(rank);
    const cudaError_t error = launch(data, rank, group.world_size(), places, &given_up, stream);
    check(error == cudaSuccess, std::string("launch of ") + name);
  }
  group.run();
  const std::string what = std::string(name) + (use_places ? "_places" : "_many");
  given_up != 0 ? data.check_untouched(what) : data.check(what);
}

}  // namespace

void check_shared_all_reduce(DeviceGroup& group, const CallShape& shape, bool places, Rng& rng) {
  check_shared(group, shape, places, rng, &launch_reduce, "reduce");
}

void check_shared_gather(DeviceGroup& group, const CallShape& shape, bool places, Rng& rng) {
  check_shared(group, shape, places, rng, &launch_gather, "copy");
}

// Kernels take turns: sums of the three types that have one, all other pairs (two turns), copies;
// each over addresses, then over places.
uint64_t shared_device_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 109 + 17);
  constexpr std::array kFast{DType::float32, DType::float16, DType::bfloat16};
  constexpr uint64_t kKernels = 6;
  const auto& pairs = all_pairs();
  for (uint64_t i = 0; i < cases; ++i) {
    const uint64_t kernel = i % kKernels, turn = i / kKernels;
    const bool places = turn % 2 == 1;
    DeviceGroup group(small_geometry(1 + static_cast<int32_t>((i + turn) % 8)), settings.options());
    group.share_device();
    const uint64_t size = turn / 2 + settings.seed + kernel * 17;
    CallShape shape = draw_shape(rng, size, (size + settings.seed) % 2 == 0);
    shape.contents = Contents::any;
    if (kernel == kKernels - 1) {
      shape.collective = Collective::all_gather;
      shape.op = ReduceOp::none;
      shape.dtype = rng.one_in(2) ? DType::uint8 : DType::float32;
      check_shared_gather(group, shape, places, rng);
      continue;
    }
    shape.dtype = kFast[kernel % kFast.size()];
    if (kernel >= kFast.size()) {
      const Pair& pair = pairs[(turn * 2 + kernel + settings.seed * 53) % pairs.size()];
      shape.dtype = pair.dtype;
      shape.op = pair.op;
    }
    check_shared_all_reduce(group, shape, places, rng);
  }
  return cases;
}

}  // namespace pycoll::sim::tests
