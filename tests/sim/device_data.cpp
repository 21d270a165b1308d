#include "device_data.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>

#include "kernels/element.h"
#include "native/random.h"

namespace pycoll::sim::tests {
namespace {

using stress::mix;

template <class T>
void put(Bytes& bytes, uint64_t i, T x) {
  std::memcpy(bytes.data() + i * sizeof(T), &x, sizeof(T));
}

void put_float(DType dtype, Bytes& bytes, uint64_t i, float x) {
  switch (dtype) {
    case DType::float16:
      return put(bytes, i, element::round_to<element::Float16>(x));
    case DType::bfloat16:
      return put(bytes, i, element::round_to<element::BFloat16>(x));
    case DType::float8_e4m3fn:
      return put(bytes, i, element::round_to<element::Float8E4M3>(x));
    case DType::float8_e5m2:
      return put(bytes, i, element::round_to<element::Float8E5M2>(x));
    case DType::float64:
    case DType::complex128:
      return put(bytes, i, double{x});
    default:
      return put(bytes, i, x);
  }
}

bool is_float(DType dtype) {
  const DTypeKind kind = dtype_info(dtype).kind;
  return kind == DTypeKind::floating || kind == DTypeKind::complex;
}

// Steps of 1/8 in a small range: sums of sixteen are exact in float32, and most of them are not
// values of a narrow type, so that a sum that is rounded twice is seen.
float exact_term(uint64_t random) {
  return static_cast<float>(static_cast<int64_t>(random % 2047) - 1023) / 8;
}
float exact_factor(uint64_t random) {
  constexpr float kFactors[] = {1, -1, 2, 0.5f, 1, 1};
  return kFactors[random % 6];
}

}  // namespace

void Buffer::Free::operator()(std::byte* p) const {
  std::free(p);
}

Buffer::Buffer(size_t bytes, size_t offset) : offset_(offset), bytes_(bytes) {
  auto* memory =
      static_cast<std::byte*>(std::malloc(offset + bytes + (offset + bytes == 0 ? 1 : 0)));
  if (memory == nullptr) throw std::bad_alloc();
  memory_.reset(memory);
  std::memset(memory, 0xa5, offset + bytes);
}

void Buffer::poison() {
  if (bytes_ > 0) std::memset(data(), 0xa5, bytes_);
}

void Buffer::fill(const Bytes& contents) {
  if (!contents.empty()) std::memcpy(data(), contents.data(), contents.size());
}

Bytes make_contents(DType dtype, ReduceOp op, uint64_t count, uint64_t seed, Contents kind) {
  Bytes bytes(count * size_of(dtype));
  const bool selects = op == ReduceOp::min || op == ReduceOp::max || op == ReduceOp::none;
  if (!is_float(dtype) || (kind == Contents::any && selects)) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(mix(seed * 0x10001 + i) >> 17);
    }
    return bytes;
  }
  const uint64_t parts = dtype_info(dtype).kind == DTypeKind::complex ? 2 : 1;
  for (uint64_t i = 0; i < count * parts; ++i) {
    const uint64_t random = mix(seed * 0x10001 + i);
    float x = op == ReduceOp::product ? exact_factor(random) : exact_term(random);
    if (kind == Contents::any) x *= 1 + static_cast<float>(random >> 40) * 0x1p-24f;
    put_float(dtype, bytes, i, x);
  }
  return bytes;
}

Bytes fold(DType dtype, ReduceOp op, const std::vector<Bytes>& vectors) {
  const ReduceKernels* kernels = find_reduce_kernels(dtype, op, Isa::baseline);
  const size_t n = vectors[0].size() / size_of(dtype);
  const int world = static_cast<int>(vectors.size());
  Bytes sum(n * size_of(kernels->acc));
  if (vectors.size() == 1) {
    if (kernels->widen == nullptr) return vectors[0];
    kernels->widen(sum.data(), vectors[0].data(), n);
  } else {
    kernels->combine[0][0](sum.data(), vectors[0].data(), vectors[1].data(), n);
    for (size_t i = 2; i < vectors.size(); ++i) {
      kernels->combine[1][0](sum.data(), sum.data(), vectors[i].data(), n);
    }
  }
  if (kernels->finish == nullptr) return sum;
  Bytes result(n * size_of(dtype));
  kernels->finish(result.data(), sum.data(), n, world);
  return result;
}

std::string difference(DType dtype, const Bytes& got, const Bytes& expected) {
  if (got == expected) return {};
  std::ostringstream text;
  if (got.size() != expected.size()) {
    text << got.size() << " bytes instead of " << expected.size();
    return text.str();
  }
  const size_t size = size_of(dtype);
  for (size_t i = 0; i < got.size() / size; ++i) {
    if (std::memcmp(got.data() + i * size, expected.data() + i * size, size) == 0) continue;
    text << "element " << i << " of " << got.size() / size << " is";
    for (size_t k = 0; k < size; ++k)
      text << ' ' << std::hex << std::to_integer<int>(got[i * size + k]);
    text << ", expected";
    for (size_t k = 0; k < size; ++k) text << ' ' << std::to_integer<int>(expected[i * size + k]);
    break;
  }
  return text.str();
}

}  // namespace pycoll::sim::tests
