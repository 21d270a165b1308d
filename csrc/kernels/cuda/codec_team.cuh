// Codec blocks of a tile: what their threads find out together. All threads of the block of
// threads come to each of these.
#pragma once

#include "kernels/cuda/codec_units.cuh"
#include "kernels/random_numbers.h"

namespace pycoll::cuda {

class BlockTeam {
 public:
  // `room`: a float for each value of the tile.
  PYCOLL_DEVICE BlockTeam(uint32_t block_bits, float* room)
      : block_(1u << block_bits), room_(room), lane_(threadIdx.x % kWarp) {}

  // The largest of each word over the codec block that this thread is in.
  template <int kWords>
  PYCOLL_DEVICE void most(int32_t (&word)[kWords]) {
    const uint32_t lanes = block_ < kWarpValues ? block_ / kUnit : kWarp;
    for (uint32_t by = lanes / 2; by > 0; by /= 2) take_most(word, static_cast<int>(by));
    if (block_ > kWarpValues) most_of_warps(word);
  }

  // The sum of term(x[k]) in the order of codec_element.h.
  template <class Term>
  PYCOLL_DEVICE float sum(const float (&x)[kUnit], const Term& term) {
    float terms[kUnit];
#pragma unroll
    for (uint32_t k = 0; k < kUnit; ++k) terms[k] = term(x[k]);
    store_unit(room_ + threadIdx.x * kUnit, kUnit, terms);
    PYCOLL_SHARED(float, sums, kMaxThreads* kUnit / kLeastBlock);
    const bool within_warp = block_ <= kWarpValues;
    sync(within_warp);
    const uint32_t first = within_warp ? (threadIdx.x - lane_) * kUnit : 0;
    add_up(first, within_warp ? Team{lane_, kWarp} : block_team(), sums);
    sync(within_warp);
    return sums[threadIdx.x * kUnit / block_];
  }

  // Numbers of the values of this thread, of which a warp's first has index `warp_first`.
  PYCOLL_DEVICE void numbers(const element::RandomStream& stream, uint64_t warp_first,
                             float (&u)[kUnit]) const {
    float* const room = room_ + (threadIdx.x - lane_) * kUnit;
    if (warp_first % element::kRandomGroup == 0) {
      __syncwarp();  // others may still read there
      fill_groups(stream, warp_first / element::kRandomGroup, room);
      __syncwarp();
    } else {
#pragma unroll 1
      for (uint32_t i = lane_ * kUnit; i < (lane_ + 1) * kUnit; ++i) {
        room[i] = element::uniform_at(stream, warp_first + i);
      }
    }
    load_unit(room + lane_ * kUnit, kUnit, u);
  }

 private:
  PYCOLL_DEVICE static void sync(bool within_warp) {
    if (within_warp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  template <int kWords>
  PYCOLL_DEVICE static void take_most(int32_t (&word)[kWords], int with) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int32_t other = __shfl_xor_sync(kAllLanes, word[w], with);
      word[w] = other > word[w] ? other : word[w];
    }
  }

  // Two arrays by turns: when one is written again, the barrier of the other has been since.
  template <int kWords>
  PYCOLL_DEVICE void most_of_warps(int32_t (&word)[kWords]) {
    constexpr uint32_t kWarps = kMaxThreads / kWarp;
    PYCOLL_SHARED(int32_t, of_warp, 2 * kWarps * kWords);
    int32_t* const found = of_warp + (odd_ ? kWarps * kWords : 0);
    odd_ = !odd_;
    const uint32_t warp = threadIdx.x / kWarp;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (lane_ == 0) found[warp * kWords + w] = word[w];
    }
    __syncthreads();
    const uint32_t warps = block_ / kWarpValues, begin = warp / warps * warps;
    for (uint32_t i = begin; i < begin + warps && i < blockDim.x / kWarp; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const int32_t other = found[i * kWords + w];
        word[w] = other > word[w] ? other : word[w];
      }
    }
  }

  // Sums of the codec blocks of `team`, whose terms are in the room from `first` on: sixteen
  // threads a block, each with every sixteenth term.
  PYCOLL_DEVICE void add_up(uint32_t first, const Team& team, float* sums) const {
    constexpr uint32_t kLanes = element::kSumLanes;
    const auto threads = static_cast<uint32_t>(team.size);
    const uint32_t end = first + threads * kUnit;  // the last block may have less room
    const uint32_t chains = (threads * kUnit + block_ - 1) / block_ * kLanes;
    // Whole warps, since they shuffle.
    for (auto c = static_cast<uint32_t>(team.index); c - lane_ < chains; c += threads) {
      const uint32_t lane = c % kLanes, begin = first + c / kLanes * block_;
      const uint32_t block_end = begin + block_ < end ? begin + block_ : end;
      float sum = 0;
      for (uint32_t i = begin + lane; i < block_end; i += kLanes) sum += room_[i];
      for (uint32_t half = kLanes / 2; half > 0; half /= 2) {
        sum += __shfl_down_sync(kAllLanes, sum, half, kLanes);
      }
      if (lane == 0 && c < chains) sums[begin / block_] = sum;
    }
  }

  // The four groups of numbers of a warp's values: sixteen threads have a group's counters.
  PYCOLL_DEVICE void fill_groups(const element::RandomStream& stream, uint64_t group,
                                 float* room) const {
    constexpr uint32_t kLanes = element::kRandomLanes, kGroup = element::kRandomGroup;
    // One counter at a time: two would take registers that the values need.
#pragma unroll 1
    for (uint32_t g = lane_ / kLanes; g < kWarpValues / kGroup; g += kWarp / kLanes) {
      const uint32_t lane = lane_ % kLanes;
      const element::Words4 words = element::random_words(stream, (group + g) * kLanes + lane);
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        room[g * kGroup + w * kLanes + lane] = element::uniform(words.word[w]);
      }
    }
  }

  uint32_t block_;
  float* room_;
  uint32_t lane_;
  bool odd_ = false;
};

}  // namespace pycoll::cuda
