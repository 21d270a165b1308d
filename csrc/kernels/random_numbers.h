// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random
// Numbers: As Easy as 1, 2, 3", SC 2011). In an unnamed namespace for the reason that element.h
// gives.
#pragma once

#include <cstdint>

#include "kernels/float_formats.h"

namespace pycoll::element {
namespace {

struct Words4 {
  uint32_t word[4];
};

PYCOLL_HD Words4 philox(Words4 counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1];
  uint32_t c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{c0} * 0xd2511f53u;
    const uint64_t b = uint64_t{c2} * 0xcd9e8d57u;
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    c0 = next0;
    c2 = next2;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// What a stream of numbers is keyed by; see RandomKey in kernels/codec.h.
struct RandomStream {
  uint64_t seed;
  uint32_t step;
  uint32_t rank;
};

// Index i takes word (i % 64) / 16 of the counter 16 * (i / 64) + i % 16: 16 neighbouring counters
// give 64 neighbouring numbers, so that vector instructions need not shuffle.
constexpr uint32_t kRandomGroup = 64;
constexpr uint32_t kRandomLanes = 16;

PYCOLL_HD Words4 random_words(const RandomStream& stream, uint64_t counter) {
  return philox({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), stream.step,
                  stream.rank}},
                static_cast<uint32_t>(stream.seed), static_cast<uint32_t>(stream.seed >> 32));
}

// In [0, 1), a multiple of 2^-24.
PYCOLL_HD float uniform(uint32_t random) {
  return static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
}

PYCOLL_HD float uniform_at(const RandomStream& stream, uint64_t index) {
  const uint64_t counter = index / kRandomGroup * kRandomLanes + index % kRandomLanes;
  const Words4 words = random_words(stream, counter);
  return uniform(words.word[index % kRandomGroup / kRandomLanes]);
}

}  // namespace
}  // namespace pycoll::element
