// Fused kernels over lists of tensors: the bytes of the CPU's.
#include <array>
#include <cmath>
#include <cstring>

#include "device_batch.h"
#include "kernels/cuda/fused.h"
#include "kernels/fused.h"

namespace pycoll::sim::tests {
namespace {

constexpr std::array kTypes{DType::float32, DType::float16, DType::bfloat16, DType::float64};
constexpr size_t kCastTypes = 3;
constexpr std::array<double, 6> kFactors{1.0, 0.5, 1.0 / 3, 65536.0, 0x1p-20, 0.0};

// A tensor in "device memory" and the same on the host.
struct Pair {
  DType dtype;
  uint64_t count;
  Buffer device;
  Bytes host;

  Pair(DType type, uint64_t elements, Rng& rng)
      : dtype(type),
        count(elements),
        device(elements * size_of(type), rng.one_in(2) ? 0 : rng.below(9) * size_of(type)) {
    const bool wild = rng.one_in(4);  // all bits: NaN, infinities, subnormals
    host = make_contents(type, wild ? ReduceOp::none : ReduceOp::sum, elements, rng.next() >> 8,
                         Contents::any);
    device.fill(host);
  }
  Tensor on_host() { return {dtype, host.data(), count}; }
  Tensor on_device() const { return {dtype, device.data(), count}; }
};

using Pairs = std::deque<Pair>;

// One tensor of every size in turn, or several, or more small ones than there are partial sums.
Pairs draw_tensors(uint64_t size, Rng& rng, size_t types) {
  Pairs pairs;
  const auto draw_type = [&] { return kTypes[rng.below(types)]; };
  pairs.emplace_back(draw_type(), size_of_case(size), rng);
  if (rng.one_in(3)) return pairs;
  const bool many = rng.one_in(16);
  const uint64_t others = many ? 260 + rng.below(40) : rng.below(6);
  for (uint64_t i = 0; i < others; ++i) {
    const uint64_t count = many ? rng.below(4) : size_of_case(rng.below(kSizes));
    pairs.emplace_back(draw_type(), count, rng);
  }
  if (rng.one_in(8)) pairs.emplace_back(draw_type(), kSumChunk * (1 + rng.below(3)), rng);
  return pairs;
}

void check_same(const Pairs& pairs, const std::string& what) {
  for (size_t i = 0; i < pairs.size(); ++i) {
    const std::string differs =
        difference(pairs[i].dtype, pairs[i].device.contents(), pairs[i].host);
    check(differs.empty(), what + ", tensor " + std::to_string(i) + " of " +
                               std::to_string(pairs.size()) + " (" +
                               std::string(name_of(pairs[i].dtype)) + "): " + differs);
  }
}

// Few blocks have several chunks a warp.
uint32_t draw_blocks(Rng& rng) {
  return rng.one_in(2) ? 1 : 1 + static_cast<uint32_t>(rng.below(kFewThreads ? 2 : 40));
}

bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

struct List {
  std::vector<Tensor> host;
  std::vector<cuda::TensorRow> rows;
  cuda::TensorTable table;

  List(Pairs& pairs, Rng& rng) {
    std::vector<Tensor> device;
    for (Pair& pair : pairs) {
      host.push_back(pair.on_host());
      device.push_back(pair.on_device());
    }
    rows = cuda::rows_of(TensorList{device.data(), device.size()}, &table);
    table.rows = rows.data();
    table.most_blocks = draw_blocks(rng);
  }
  TensorList on_host() const { return {host.data(), host.size()}; }
};

// Unscales, then clips by what came out, as a training step does.
void check_unscale(DeviceGroup& group, uint64_t size, Rng& rng) {
  Pairs pairs = draw_tensors(size, rng, kTypes.size());
  List list(pairs, rng);
  const double factor = kFactors[rng.below(kFactors.size())], max_norm = 1.0 + rng.below(1000);
  const auto device_factor = static_cast<float>(factor);
  Buffer sums(list.table.chunks * sizeof(double)), total(sizeof(double));
  float found_inf = 0;
  cuda::UnscaleListCall call;
  call.table = list.table;
  call.factor.value = factor;
  if (rng.one_in(2)) call.factor = {0.0, &device_factor};
  call.chunk_sums = reinterpret_cast<double*>(sums.data());
  call.sum_of_squares = reinterpret_cast<double*>(total.data());
  call.found_inf = &found_inf;
  const double used = call.factor.device_value != nullptr ? double{device_factor} : factor;
  check(cuda::unscale_list(call, group.stream(0)) == cudaSuccess, "launch of unscale_list");
  group.run();
  const FusedKernels& kernels = fused_kernels(Isa::baseline);
  const Unscaled expected = kernels.unscale(list.on_host(), used);
  check_same(pairs, "unscale_list");
  const double got = *call.sum_of_squares;
  check(same_bits(got, expected.sum_of_squares), "the sum of squares is " + std::to_string(got) +
                                                     " instead of " +
                                                     std::to_string(expected.sum_of_squares));
  check(found_inf == (expected.found_inf ? 1.0f : 0.0f),
        "found_inf is " + std::to_string(found_inf));

  const double clip = max_norm / (std::sqrt(got) + 1e-6);
  check(
      cuda::clip_list({list.table, call.sum_of_squares, max_norm}, group.stream(0)) == cudaSuccess,
      "launch of clip_list");
  group.run();
  if (!(clip >= 1)) kernels.multiply(list.on_host(), clip);
  check_same(pairs, "clip_list");
}

void check_multiply(DeviceGroup& group, uint64_t size, Rng& rng) {
  Pairs pairs = draw_tensors(size, rng, kTypes.size());
  List list(pairs, rng);
  const double factor = kFactors[rng.below(kFactors.size())];
  check(cuda::multiply_list({list.table, {factor}}, group.stream(0)) == cudaSuccess,
        "launch of multiply_list");
  group.run();
  fused_kernels(Isa::baseline).multiply(list.on_host(), factor);
  check_same(pairs, "multiply_list");
}

void check_cast(DeviceGroup& group, uint64_t size, Rng& rng) {
  Pairs sources = draw_tensors(size, rng, kCastTypes), targets;
  std::vector<CastTensor> host, device;
  for (Pair& source : sources) {
    const bool in_place = rng.one_in(4);
    const DType to = in_place ? source.dtype : kTypes[rng.below(kCastTypes)];
    Pair& target = in_place ? source : targets.emplace_back(to, source.count, rng);
    host.push_back({source.dtype, source.host.data(), to, target.host.data(), source.count});
    device.push_back({source.dtype, source.device.data(), to, target.device.data(), source.count});
  }
  cuda::CastListCall call;
  const std::vector<cuda::TensorRow> rows =
      cuda::rows_of(CastList{device.data(), device.size()}, &call.table);
  call.table.rows = rows.data();
  call.table.most_blocks = draw_blocks(rng);
  call.scale = static_cast<float>(kFactors[rng.below(kFactors.size())]);
  float found_inf = 0;
  if (!rng.one_in(4)) call.found_inf = &found_inf;
  check(cuda::cast_list(call, group.stream(0)) == cudaSuccess, "launch of cast_list");
  group.run();
  const bool found = fused_kernels(Isa::baseline).cast({host.data(), host.size()}, call.scale);
  check_same(targets, "cast_list");
  check_same(sources, "cast_list, sources");
  const float expected = call.found_inf != nullptr && found ? 1.0f : 0.0f;
  check(found_inf == expected, "found_inf is " + std::to_string(found_inf));
}

}  // namespace

uint64_t fused_suite(const Settings& settings, uint64_t cases) {
  Rng rng(settings.seed * 131 + 29);
  constexpr std::array kChecks{check_unscale, check_multiply, check_cast};
  for (uint64_t i = 0; i < cases; ++i) {
    DeviceGroup group(small_geometry(1), settings.options());
    kChecks[i % kChecks.size()](group, size_index(i, kChecks.size()) + settings.seed, rng);
  }
  return cases;
}

}  // namespace pycoll::sim::tests
