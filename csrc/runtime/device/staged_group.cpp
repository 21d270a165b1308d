#include "runtime/device/staged_group.h"

#include <bit>

#include "core/error.h"

namespace pycoll::cuda {
namespace {

constexpr size_t kAlign = 64;

size_t padded(const Block& block, size_t element) {
  return (block.count * element + kAlign - 1) / kAlign * kAlign;
}

size_t padded(const VectorView& view, size_t element) {
  size_t bytes = 0;
  for (const Block& block : view.blocks) bytes += padded(block, element);
  return bytes;
}

void copy(const void* from, void* to, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

// The same blocks in host memory from `at` on.
VectorView image_of(const VectorView& view, size_t element, std::byte* at) {
  VectorView image;
  for (const Block& block : view.blocks) {
    image.blocks.push_back({at, block.count});
    at += padded(block, element);
  }
  return image;
}

void copy(const VectorView& from, const VectorView& to, size_t element, cudaStream_t stream) {
  for (size_t i = 0; i < from.blocks.size(); ++i) {
    copy(from.blocks[i].data, to.blocks[i].data, from.blocks[i].count * element, stream);
  }
}

}  // namespace

std::byte* StagedGroup::room(size_t bytes) {
  if (pinned_.size() < bytes) {
    pinned_ = {};
    pinned_ = PinnedMemory(std::bit_ceil(bytes));
  }
  return pinned_.data();
}

void StagedGroup::launch(const CallRequest& request, cudaStream_t stream) {
  const size_t element = size_of(request.dtype);
  const size_t inputs = padded(request.input, element);
  std::byte* const memory = room(inputs + padded(request.output, element));
  CallRequest on_host;
  on_host.timeout = request.timeout;
  on_host.collective = request.collective;
  on_host.dtype = request.dtype;
  on_host.reduce_op = request.reduce_op;
  on_host.root = request.root;
  on_host.algorithm = request.algorithm;
  on_host.premul_factor = request.premul_factor;
  on_host.input = image_of(request.input, element, memory);
  on_host.output = image_of(request.output, element, memory + inputs);
  const VectorView output = on_host.output;
  copy(request.input, on_host.input, element, stream);
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  control().run(std::move(on_host), nullptr);
  copy(output, request.output, element, stream);
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void StagedGroup::launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) {
  size_t bytes = 0;
  for (const MessageRequest& message : batch) {
    bytes += padded(message.block, size_of(message.dtype));
  }
  std::byte* at = room(bytes);
  std::vector<Block> images;
  for (const MessageRequest& message : batch) {
    const size_t element = size_of(message.dtype);
    images.push_back({at, message.block.count});
    at += padded(message.block, element);
    if (message.receives) continue;
    copy(message.block.data, images.back().data, message.block.count * element, stream);
  }
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::vector<std::shared_ptr<Operation>> operations;
  for (size_t i = 0; i < batch.size(); ++i) {
    MessageRequest on_host;
    on_host.timeout = batch[i].timeout;
    on_host.receives = batch[i].receives;
    on_host.peer = batch[i].peer;
    on_host.tag = batch[i].tag;
    on_host.dtype = batch[i].dtype;
    on_host.block = images[i];
    operations.push_back(control().submit(std::move(on_host)));
  }
  for (const auto& operation : operations) control().wait(operation, std::nullopt, nullptr);
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!batch[i].receives) continue;
    copy(images[i].data, batch[i].block.data, images[i].count * size_of(batch[i].dtype), stream);
  }
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace pycoll::cuda
