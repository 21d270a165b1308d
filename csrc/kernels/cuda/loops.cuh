// Loops that threads share: who does which iterations, and copies.
#pragma once

#include "device/device.cuh"

namespace pycoll::cuda {

// Some threads that work on one range together: those of a block, or of a grid.
struct Team {
  uint64_t index;
  uint64_t size;
};
PYCOLL_DEVICE Team block_team() {
  return {threadIdx.x, blockDim.x};
}
PYCOLL_DEVICE Team grid_team() {
  return {uint64_t{blockIdx.x} * blockDim.x + threadIdx.x, uint64_t{gridDim.x} * blockDim.x};
}

// body(first, stride, kUnroll) for iterations first, first + stride, ...: kUnroll at a time, so
// that many loads are under way, then one at a time.
template <int kCount>
struct Batch {
  static constexpr int kSize = kCount;
};
template <int kUnroll, class Body>
PYCOLL_DEVICE void for_each(const Team& team, uint64_t count, const Body& body) {
  uint64_t i = team.index;
  if constexpr (kUnroll > 1) {
    for (; i + (kUnroll - 1) * team.size < count; i += kUnroll * team.size) {
      body(Batch<kUnroll>{}, i, team.size);
    }
  }
  for (; i < count; i += team.size) body(Batch<1>{}, i, team.size);
}

// Bits in which some address is not a multiple of 16.
PYCOLL_DEVICE uint32_t low_bits(const void* p) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p) & 15);
}

// ---- Copies to one or two places. ----

struct Copy {
  const std::byte* src;
  std::byte* dst;
  std::byte* also;  // may be nullptr
};

PYCOLL_DEVICE uint64_t copy_packs(const Team& team, const Copy& copy, uint64_t bytes) {
  const uint64_t packs = bytes / 16;
  for_each<4>(team, packs, [&](auto batch, uint64_t first, uint64_t stride) {
    constexpr int kSize = decltype(batch)::kSize;
    device::Pack<uint32_t> packs_read[kSize];
#pragma unroll
    for (int u = 0; u < kSize; ++u) {
      const uint64_t i = first + u * stride;
      packs_read[u] = device::load_pack(reinterpret_cast<const uint32_t*>(copy.src) + i * 4);
    }
#pragma unroll
    for (int u = 0; u < kSize; ++u) {
      const uint64_t i = first + u * stride;
      device::store_pack(reinterpret_cast<uint32_t*>(copy.dst) + i * 4, packs_read[u]);
      if (copy.also == nullptr) continue;
      device::store_pack(reinterpret_cast<uint32_t*>(copy.also) + i * 4, packs_read[u]);
    }
  });
  return packs * 16;
}

// Bytes [begin, end), both multiples of the word but for the end of single bytes.
template <class Word>
PYCOLL_DEVICE void copy_words(const Team& team, const Copy& copy, uint64_t begin, uint64_t end) {
  const auto* src = reinterpret_cast<const Word*>(copy.src + begin);
  auto* dst = reinterpret_cast<Word*>(copy.dst + begin);
  auto* also = copy.also == nullptr ? nullptr : reinterpret_cast<Word*>(copy.also + begin);
  for_each<4>(team, (end - begin) / sizeof(Word), [&](auto batch, uint64_t first, uint64_t stride) {
    constexpr int kSize = decltype(batch)::kSize;
    Word words[kSize];
#pragma unroll
    for (int u = 0; u < kSize; ++u) words[u] = src[first + u * stride];
#pragma unroll
    for (int u = 0; u < kSize; ++u) {
      dst[first + u * stride] = words[u];
      if (also != nullptr) also[first + u * stride] = words[u];
    }
  });
}

// In the widest words that all addresses and the length allow: vectors of 4 and 2-byte elements
// that begin anywhere are not copied byte by byte.
PYCOLL_DEVICE void copy_bytes(const Team& team, const Copy& copy, uint64_t bytes) {
  const uint32_t bits = low_bits(copy.src) | low_bits(copy.dst) | low_bits(copy.also);
  if (bits == 0) {
    const uint64_t done = copy_packs(team, copy, bytes);
    copy_words<uint8_t>(team, copy, done, bytes);
    return;
  }
  const uint32_t all = bits | static_cast<uint32_t>(bytes);
  if (all % 4 == 0) {
    copy_words<uint32_t>(team, copy, 0, bytes);
  } else if (all % 2 == 0) {
    copy_words<uint16_t>(team, copy, 0, bytes);
  } else {
    copy_words<uint8_t>(team, copy, 0, bytes);
  }
}

}  // namespace pycoll::cuda
