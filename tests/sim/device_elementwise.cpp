// Casts and scaling.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "device_batch.h"
#include "kernels/element.h"

namespace pycoll::sim::tests {
namespace {

// Sizes that were aligned with one seed are not with the next.
struct Place {
  uint64_t count;
  bool aligned;

  Place(uint64_t size, uint64_t seed)
      : count(size_of_case(size + seed)), aligned((size + seed + seed) % 2 == 0) {}
  size_t offset(Rng& rng) const { return aligned ? 0 : rng.below(9); }
};

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

void check_cast(DeviceGroup& group, DType from, DType to, Rng& rng, const Place& place) {
  cuda::CastCall call;
  call.from = from;
  call.to = to;
  const uint64_t count = call.count = place.count;
  constexpr std::array<float, 5> kScales{1.0f, 0.5f, 1.0f / 3, 65536.0f, 0x1p-20f};
  call.scale = kScales[rng.below(kScales.size())];
  const bool wild = rng.one_in(2);  // all bits: NaN, infinities, subnormals
  const Bytes contents = make_contents(call.from, wild ? ReduceOp::none : ReduceOp::sum, count,
                                       rng.next() >> 8, wild ? Contents::any : Contents::exact);
  Buffer input(contents.size(), place.offset(rng) * size_of(call.from));
  Buffer output(count * size_of(call.to), place.offset(rng) * size_of(call.to));
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

void check_scale(DeviceGroup& group, DType dtype, Rng& rng, const Place& place) {
  const uint64_t count = place.count;
  const ReduceKernels* kernels = find_reduce_kernels(dtype, ReduceOp::premul_sum, Isa::baseline);
  constexpr std::array<double, 4> kFactors{0.5, -3.0, 1.0 / 3, 1e-3};
  const double factor = kFactors[rng.below(kFactors.size())];
  const Bytes contents = make_contents(dtype, ReduceOp::sum, count, rng.next() >> 8, Contents::any);
  Bytes expected(contents.size());
  if (count > 0) kernels->scale(expected.data(), contents.data(), count, factor);
  Buffer input(contents.size(), place.offset(rng) * size_of(dtype));
  Buffer output(contents.size(), place.offset(rng) * size_of(dtype));
  input.fill(contents);
  const Buffer& result = rng.one_in(2) ? input : output;
  const cuda::ScaleCall call{dtype, input.data(), result.data(), count, factor};
  check(cuda::scale(call, group.stream(0)) == cudaSuccess, "launch of scale");
  group.run();
  const std::string differs = difference(dtype, result.contents(), expected);
  check(differs.empty(), "scale of " + std::string(name_of(dtype)) + ": " + differs);
}

}  // namespace

uint64_t cast_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 113 + 19);
  for (uint64_t i = 0; i < cases; ++i) {
    DeviceGroup group(small_geometry(1), settings.options());
    check_cast(group, kFloats[i % 3], kFloats[i / 3 % 3], rng, {size_index(i, 9), settings.seed});
  }
  return cases;
}

uint64_t scale_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 127 + 23);
  std::vector<DType> dtypes;
  for (int d = 0; d < static_cast<int>(DType::kCount); ++d) {
    const auto dtype = static_cast<DType>(d);
    if (cuda::can_reduce(dtype, ReduceOp::premul_sum)) dtypes.push_back(dtype);
  }
  for (uint64_t i = 0; i < cases; ++i) {
    DeviceGroup group(small_geometry(1), settings.options());
    check_scale(group, dtypes[i % dtypes.size()], rng,
                {size_index(i, dtypes.size()), settings.seed});
  }
  return cases;
}

}  // namespace pycoll::sim::tests
