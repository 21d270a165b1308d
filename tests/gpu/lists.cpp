#include "lists.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/fused.h"
#include "kernels/fused.h"
#include "world.h"

namespace pycoll::gpu_tests {
namespace {

using Bytes = std::vector<std::byte>;
constexpr DType kTypes[] = {DType::float32, DType::float16, DType::bfloat16, DType::float64};

// Tensors one after the other in one piece of memory, on the device and on the host.
class Tensors {
 public:
  // The first `types` of kTypes; values of all bits, NaN among them, if `wild`.
  Tensors(const std::vector<uint64_t>& counts, int types, bool wild, std::mt19937_64& random) {
    std::vector<size_t> places;
    size_t end = 0;
    for (const uint64_t count : counts) {
      const DType dtype = kTypes[random() % static_cast<uint64_t>(types)];
      end += (size_of(dtype) - end % size_of(dtype)) % size_of(dtype);  // else at any place
      places.push_back(end);
      host_.push_back({dtype, nullptr, count});
      end += count * size_of(dtype);
    }
    memory_.resize(end);
    device_memory_ = Memory(end);
    device_ = host_;
    for (size_t i = 0; i < counts.size(); ++i) {
      host_[i].values = memory_.data() + places[i];
      device_[i].values = device_memory_.as<std::byte>() + places[i];
      fill(host_[i], wild, random);
    }
    require(cudaMemcpy(device_memory_.as<void>(), memory_.data(), end, cudaMemcpyHostToDevice),
            "cudaMemcpy");
  }

  const std::vector<Tensor>& host() const { return host_; }
  const std::vector<Tensor>& device() const { return device_; }
  TensorList host_list() const { return {host_.data(), host_.size()}; }

  void check(const char* what) const {
    Bytes got(memory_.size());
    require(cudaMemcpy(got.data(), device_memory_.as<void>(), got.size(), cudaMemcpyDeviceToHost),
            what);
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] == memory_[i]) continue;
      throw std::runtime_error(concat(what, ": byte ", i, " of ", got.size(), " is ",
                                      static_cast<int>(got[i]), ", not ",
                                      static_cast<int>(memory_[i])));
    }
  }

 private:
  static void fill(const Tensor& tensor, bool wild, std::mt19937_64& random) {
    auto* bytes = static_cast<std::byte*>(tensor.values);
    const size_t size = size_of(tensor.dtype);
    for (size_t i = 0; i < tensor.count * size; ++i) {
      bytes[i] = static_cast<std::byte>(random());
      // Positive and small: the second highest bit of the exponent is never set.
      if (!wild && i % size == size - 1) bytes[i] &= std::byte{0x3f};
    }
  }

  std::vector<Tensor> host_, device_;
  Bytes memory_;
  Memory device_memory_;
};

template <class List>
struct Uploaded {
  cuda::TensorTable table;
  Memory rows;

  explicit Uploaded(const List& list) {
    const std::vector<cuda::TensorRow> host = cuda::rows_of(list, &table);
    rows = Memory(host.size() * sizeof(host[0]));
    require(cudaMemcpy(rows.as<void>(), host.data(), host.size() * sizeof(host[0]),
                       cudaMemcpyHostToDevice),
            "cudaMemcpy");
    table.rows = rows.as<cuda::TensorRow>();
  }
};

template <class T>
T value_at(const Memory& memory) {
  T value;
  require(cudaMemcpy(&value, memory.as<void>(), sizeof(value), cudaMemcpyDeviceToHost), "result");
  return value;
}

void check_flag(const Memory& found, bool expected, const char* what) {
  if ((value_at<float>(found) == 1.0f) == expected) return;
  throw std::runtime_error(concat(what, ": found_inf is not ", expected));
}

void check_unscale_and_clip(const std::vector<uint64_t>& counts, bool wild,
                            std::mt19937_64& random) {
  const Tensors tensors(counts, 4, wild, random);
  const Uploaded table(TensorList{tensors.device().data(), tensors.device().size()});
  const Memory sums(table.table.chunks * sizeof(double)), total(sizeof(double)), found(4);
  require(cuda::unscale_list(
              {table.table, {1.0 / 3}, sums.as<double>(), total.as<double>(), found.as<float>()},
              nullptr),
          "unscale_list");
  const FusedKernels& kernels = fused_kernels(Isa::baseline);
  const Unscaled expected = kernels.unscale(tensors.host_list(), 1.0 / 3);
  tensors.check("unscale_list");
  check_flag(found, expected.found_inf, "unscale_list");
  const auto sum = value_at<double>(total);
  if (std::memcmp(&sum, &expected.sum_of_squares, sizeof(sum)) != 0) {
    throw std::runtime_error(
        concat("the sum of squares is ", sum, ", not ", expected.sum_of_squares));
  }
  require(cuda::clip_list({table.table, total.as<double>(), 0.5}, nullptr), "clip_list");
  const double factor = 0.5 / (std::sqrt(sum) + 1e-6);
  if (!(factor >= 1)) kernels.multiply(tensors.host_list(), factor);
  tensors.check("clip_list");
}

void check_cast(const std::vector<uint64_t>& counts, bool wild, std::mt19937_64& random) {
  const Tensors sources(counts, 3, wild, random), targets(counts, 3, wild, random);
  std::vector<CastTensor> host, device;
  for (size_t i = 0; i < counts.size(); ++i) {
    const Tensor &source = sources.host()[i], &target = targets.host()[i];
    host.push_back({source.dtype, source.values, target.dtype, target.values, counts[i]});
    device.push_back({source.dtype, sources.device()[i].values, target.dtype,
                      targets.device()[i].values, counts[i]});
  }
  const Uploaded table(CastList{device.data(), device.size()});
  const Memory found(4);
  require(cuda::cast_list({table.table, 3.0f, found.as<float>()}, nullptr), "cast_list");
  const bool expected = fused_kernels(Isa::baseline).cast({host.data(), host.size()}, 3.0f);
  targets.check("cast_list");
  sources.check("cast_list");
  check_flag(found, expected, "cast_list");
}

}  // namespace

void check_lists(int cases, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int i = 0; i < cases; ++i) {
    const bool many = i % 4 == 3;  // more chunks than partial sums
    std::vector<uint64_t> counts;
    const uint64_t tensors = many ? 300 : 1 + random() % 8;
    for (uint64_t k = 0; k < tensors; ++k) counts.push_back(random() % (many ? 5 : 10'000));
    check_unscale_and_clip(counts, random() % 3 == 0, random);
    check_cast(counts, random() % 3 == 0, random);
  }
}

}  // namespace pycoll::gpu_tests
