// Kernels that wait for nobody: those of ranks that share a GPU, casts and scaling.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "device_scenarios.h"
#include "kernels/element.h"

namespace pycoll::sim::tests {
namespace {

using stress::Rng;

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

// As the host orders it: one rank after the other sums its part into the outputs of all.
void check_shared_all_reduce(DeviceGroup& group, const Pair& pair, Rng& rng, uint64_t count) {
  CallShape shape;
  shape.dtype = pair.dtype;
  shape.op = pair.op;
  shape.contents = Contents::any;
  shape.count = count;
  shape.in_place = rng.one_in(2);
  shape.offset = rng.one_in(2) ? 0 : rng.below(9);
  shape.seed = rng.next() >> 8;
  const CallData data(shape, group.world_size());
  for (int32_t rank = 0; rank < group.world_size(); ++rank) {
    cuda::ReduceManyCall call;
    call.arithmetic = {shape.dtype, shape.op, group.world_size()};
    call.sources = call.targets = group.world_size();
    for (int32_t peer = 0; peer < group.world_size(); ++peer) {
      call.input[peer] = data.input(peer).block[0];
      call.output[peer] = data.output(peer).block[0];
    }
    const ChunkRange part = chunk_range(count, group.world_size(), rank, 4);
    call.begin = part.begin;
    call.end = part.end;
    check(cuda::reduce_many(call, group.stream(rank)) == cudaSuccess, "launch of reduce_many");
  }
  group.run();
  data.check("reduce_many");
}

void check_shared_gather(DeviceGroup& group, Rng& rng, uint64_t count) {
  CallShape shape;
  shape.collective = Collective::all_gather;
  shape.op = ReduceOp::none;
  shape.dtype = rng.one_in(2) ? DType::uint8 : DType::float32;
  shape.contents = Contents::any;
  shape.count = count;
  shape.in_place = rng.one_in(2);
  shape.offset = rng.below(9);
  shape.seed = rng.next() >> 8;
  const CallData data(shape, group.world_size());
  for (int32_t rank = 0; rank < group.world_size(); ++rank) {
    cuda::CopyManyCall call;
    const cuda::Vector output = data.output(rank);
    for (int32_t peer = 0; peer < group.world_size(); ++peer) {
      const cuda::Vector input = data.input(peer);
      call.src[call.copies] = input.block[0];
      call.dst[call.copies] = output.block[peer];
      call.bytes[call.copies++] = input.count[0] * size_of(shape.dtype);
    }
    check(cuda::copy_many(call, group.stream(rank)) == cudaSuccess, "launch of copy_many");
  }
  group.run();
  data.check("copy_many");
}

// ---- Casts. ----

constexpr std::array kFloats{DType::float32, DType::float16, DType::bfloat16};

float value_at(DType dtype, const std::byte* data, uint64_t i) {
  uint16_t half = 0;
  float single = 0;
  if (dtype == DType::float32) {
    std::memcpy(&single, data + i * 4, 4);
    return single;
  }
  std::memcpy(&half, data + i * 2, 2);
  return dtype == DType::float16 ? element::to_float32(element::Float16{half})
                                 : element::to_float32(element::BFloat16{half});
}

// Rounds to nearest even by arithmetic in double, not by bits: independent of every conversion
// here.
float rounded(DType dtype, float x) {
  if (dtype == DType::float32 || !std::isfinite(x) || x == 0) return x;
  const int digits = dtype == DType::float16 ? 11 : 8, least = dtype == DType::float16 ? -14 : -126;
  int exponent = 0;
  std::frexp(x, &exponent);  // x = m * 2^exponent, 0.5 <= |m| < 1
  const double spacing = std::ldexp(1.0, std::max(exponent - 1, least) - (digits - 1));
  const double y = std::nearbyint(x / spacing) * spacing;
  const double largest = dtype == DType::float16 ? 65504.0 : std::ldexp(255.0, 120);
  return std::fabs(y) > largest ? std::copysign(INFINITY, x) : static_cast<float>(y);
}

bool same(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

void check_cast(DeviceGroup& group, Rng& rng, uint64_t count) {
  cuda::CastCall call;
  call.from = kFloats[rng.below(3)];
  call.to = kFloats[rng.below(3)];
  call.count = count;
  constexpr std::array<float, 5> kScales{1.0f, 0.5f, 1.0f / 3, 65536.0f, 0x1p-20f};
  call.scale = kScales[rng.below(kScales.size())];
  const bool wild = rng.one_in(2);  // all bits: NaN, infinities, subnormals
  const Bytes contents = make_contents(call.from, wild ? ReduceOp::none : ReduceOp::sum, count,
                                       rng.next() >> 8, wild ? Contents::any : Contents::exact);
  const size_t offset = rng.one_in(2) ? 0 : rng.below(9);
  Buffer input(contents.size(), offset * size_of(call.from));
  Buffer output(count * size_of(call.to), rng.below(3) * size_of(call.to));
  input.fill(contents);
  const bool in_place = size_of(call.from) == size_of(call.to) && rng.one_in(3);
  const Buffer& result = in_place ? input : output;
  float found_inf = 0;
  call.input = input.data();
  call.output = result.data();
  if (!rng.one_in(4)) call.found_inf = &found_inf;
  check(cuda::cast(call, group.stream(0)) == cudaSuccess, "launch of cast");
  group.run();
  bool finite = true;
  for (uint64_t i = 0; i < count; ++i) {
    const float x = value_at(call.from, contents.data(), i) * call.scale;
    const float y = rounded(call.to, x);
    finite &= std::isfinite(y);
    const float got = value_at(call.to, result.data(), i);
    check(same(got, y), "cast " + std::string(name_of(call.from)) + " to " +
                            std::string(name_of(call.to)) + ", element " + std::to_string(i) +
                            " of " + std::to_string(count) + ": " + std::to_string(got) +
                            " instead of " + std::to_string(y));
  }
  const float expected = call.found_inf != nullptr && !finite ? 1.0f : 0.0f;
  check(found_inf == expected, "found_inf is " + std::to_string(found_inf));
}

void check_scale(DeviceGroup& group, const Pair& pair, Rng& rng, uint64_t count) {
  const ReduceKernels* kernels = find_reduce_kernels(pair.dtype, pair.op, Isa::baseline);
  constexpr std::array<double, 4> kFactors{0.5, -3.0, 1.0 / 3, 1e-3};
  const double factor = kFactors[rng.below(kFactors.size())];
  const Bytes contents =
      make_contents(pair.dtype, ReduceOp::sum, count, rng.next() >> 8, Contents::any);
  Bytes expected(contents.size());
  if (count > 0) kernels->scale(expected.data(), contents.data(), count, factor);
  Buffer input(contents.size(), rng.below(3) * size_of(pair.dtype));
  Buffer output(contents.size(), rng.below(3) * size_of(pair.dtype));
  input.fill(contents);
  const Buffer& result = rng.one_in(2) ? input : output;
  const cuda::ScaleCall call{pair.dtype, input.data(), result.data(), count, factor};
  check(cuda::scale(call, group.stream(0)) == cudaSuccess, "launch of scale");
  group.run();
  const std::string differs = difference(pair.dtype, result.contents(), expected);
  check(differs.empty(), "scale of " + std::string(name_of(pair.dtype)) + ": " + differs);
}

}  // namespace

uint64_t shared_device_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 109 + 17);
  const auto& pairs = all_pairs();
  for (uint64_t i = 0; i < cases; ++i) {
    DeviceGroup group(small_geometry(1 + static_cast<int32_t>(i % 8)), settings.options());
    group.share_device();
    const uint64_t count = size_of_case(i * 31 + settings.seed);
    if (i % 8 == 7) {
      check_shared_gather(group, rng, count);
    } else {
      check_shared_all_reduce(group, pairs[(i + settings.seed) % pairs.size()], rng, count);
    }
  }
  return cases;
}

uint64_t cast_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 113 + 19);
  for (uint64_t i = 0; i < cases; ++i) {
    DeviceGroup group(small_geometry(1), settings.options());
    check_cast(group, rng, size_of_case(i * 43 + settings.seed));
  }
  return cases;
}

uint64_t scale_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 127 + 23);
  std::vector<Pair> pairs;
  for (const Pair& pair : all_pairs()) {
    if (pair.op == ReduceOp::premul_sum) pairs.push_back(pair);
  }
  for (uint64_t i = 0; i < cases; ++i) {
    DeviceGroup group(small_geometry(1), settings.options());
    check_scale(group, pairs[i % pairs.size()], rng, size_of_case(i * 29 + settings.seed));
  }
  return cases;
}

}  // namespace pycoll::sim::tests
