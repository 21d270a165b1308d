#include "runtime/device/staged_carrier.h"

#include <algorithm>

namespace pycoll::cuda {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kLeastRoom = size_t{1} << 16;

size_t padded(const Block& block) {
  return (block.count + kAlign - 1) / kAlign * kAlign;
}

size_t padded(const VectorView& view) {
  size_t bytes = 0;
  for (const Block& block : view.blocks) bytes += padded(block);
  return bytes;
}

void copy(const void* from, void* to, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

}  // namespace

// A block that is sent from where it is received, a rank's own of an all_gather, has one image, and
// need not come back.
void StagedCarrier::begin(size_t slot, const CallRequest& call, cudaStream_t stream) {
  CallRequest on_host;
  on_host.timeout = call.timeout;
  on_host.collective = call.collective;
  on_host.dtype = call.dtype;
  on_host.root = call.root;
  on_host.over = call.over;
  std::byte* at = parts_.memory[slot].room(padded(call.input) + padded(call.output), kLeastRoom);
  const auto image_of = [&at](const Block& block) {
    const Block image{at, block.count};
    at += padded(block);
    return image;
  };
  for (const Block& block : call.input.blocks) {
    on_host.input.blocks.push_back(image_of(block));
    copy(block.data, on_host.input.blocks.back().data, block.count, stream);
  }
  back_[slot].clear();
  for (const Block& block : call.output.blocks) {
    const auto sent = std::ranges::find(call.input.blocks, block.data, &Block::data);
    if (sent != call.input.blocks.end() && sent->count == block.count) {
      on_host.output.blocks.push_back(
          on_host.input.blocks[static_cast<size_t>(sent - call.input.blocks.begin())]);
      continue;
    }
    on_host.output.blocks.push_back(image_of(block));
    back_[slot].push_back({on_host.output.blocks.back().data, block.data, block.count});
  }
  const auto work = [run = parts_.run, on_host] { run(CallRequest(on_host)); };
  parts_.work.begin(slot, work, parts_.captured, stream);
}

void StagedCarrier::end(size_t slot, cudaStream_t stream) {
  parts_.work.end(slot, stream);
  for (const Copy& one : back_[slot]) copy(one.from, one.to, one.bytes, stream);
}

}  // namespace pycoll::cuda
