#include "runtime/device/news.h"

#include <cstring>

namespace pycoll::cuda {

PeerNews::PeerNews(const Regions& regions, uint64_t offset, int rank)
    : regions_(regions),
      offset_(offset),
      rank_(rank),
      words_(sizeof(uint32_t) * (static_cast<size_t>(regions.world_size()) + 1)) {
  std::memset(words_.data(), 0, words_.size());
  const uint32_t gone = 1;
  std::memcpy(words_.data() + sizeof(gone) * static_cast<size_t>(regions.world_size()), &gone,
              sizeof(gone));
}

void PeerNews::tell() {
  const std::byte* gone =
      words_.data() + sizeof(uint32_t) * static_cast<size_t>(regions_.world_size());
  for (int peer = 0; peer < regions_.world_size(); ++peer) {
    if (peer == rank_) continue;
    std::byte* word = regions_.of(peer) + offset_ + sizeof(uint32_t) * static_cast<size_t>(rank_);
    // An error has nobody to go to: the group is dead already.
    cudaMemcpyAsync(word, gone, sizeof(uint32_t), cudaMemcpyDefault, stream_.get());
  }
}

std::optional<int> PeerNews::look() {
  const auto now = Clock::now();
  if (asked_ && read_.query() == cudaSuccess) {
    asked_ = false;
    for (int peer = 0; peer < regions_.world_size(); ++peer) {
      uint32_t word = 0;
      std::memcpy(&word, words_.data() + sizeof(word) * static_cast<size_t>(peer), sizeof(word));
      if (word != 0) return peer;
    }
  }
  if (asked_ || now - asked_at_ < kPeriod) return std::nullopt;
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(regions_.world_size());
  const cudaError_t copied = cudaMemcpyAsync(words_.data(), regions_.of(rank_) + offset_, bytes,
                                             cudaMemcpyDefault, stream_.get());
  asked_ = copied == cudaSuccess && cudaEventRecord(read_.get(), stream_.get()) == cudaSuccess;
  asked_at_ = now;
  return std::nullopt;
}

}  // namespace pycoll::cuda
