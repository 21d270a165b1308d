#include "runtime/device/staged_group.h"

#include "core/error.h"

namespace pycoll::cuda {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kLeastRoom = size_t{1} << 20;
// Codes that cross at a time, as a multiple of what the CPU path sends: 4 MiB unless somebody chose
// otherwise.
constexpr uint64_t kPortionSlots = 32;

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

StagedGroup::StagedGroup(GroupSeed seed) : CudaGroup(std::move(seed)), host_(driver_) {}

void StagedGroup::connect() {
  staging_ = control().split(0);
}

void StagedGroup::ended() {
  if (staging_ != nullptr) staging_->abort("its work on GPUs has ended");
}

void StagedGroup::launch(const CallRequest& request, cudaStream_t stream) {
  const size_t element = size_of(request.dtype);
  const size_t inputs = padded(request.input, element);
  std::byte* const memory = pinned_.room(inputs + padded(request.output, element), kLeastRoom);
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
  copy(request.input, on_host.input, element, stream);
  const auto work = [this, on_host] { staging_->run(CallRequest(on_host), nullptr); };
  host_.begin(0, work, is_captured(), stream);
  host_.end(0, stream);
  copy(on_host.output, request.output, element, stream);
}

StagedCarrier StagedGroup::carrier_among(const Communicator& ranks,
                                         std::function<void(CallRequest)> run) {
  return StagedCarrier({host_, codes_, ranks, std::move(run), is_captured(),
                        control().config().slot_bytes * kPortionSlots});
}

void StagedGroup::launch_over_codec(const CodecRequest& request, cudaStream_t stream) {
  const auto run = [ranks = staging_](CallRequest call) { ranks->run(std::move(call), nullptr); };
  StagedCarrier carrier = carrier_among(*staging_, run);
  codecs().run({request}, carrier, stream);
}

void StagedGroup::launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) {
  size_t bytes = 0;
  for (const MessageRequest& message : batch) {
    bytes += padded(message.block, size_of(message.dtype));
  }
  std::byte* at = pinned_.room(bytes, kLeastRoom);
  std::vector<MessageRequest> on_host;
  for (const MessageRequest& message : batch) {
    const size_t element = size_of(message.dtype);
    MessageRequest& image = on_host.emplace_back();
    image.timeout = message.timeout;
    image.receives = message.receives;
    image.peer = message.peer;
    image.tag = message.tag;
    image.dtype = message.dtype;
    image.block = {at, message.block.count};
    at += padded(message.block, element);
    if (message.receives) continue;
    copy(message.block.data, image.block.data, message.block.count * element, stream);
  }
  const auto work = [this, on_host] {
    std::vector<std::shared_ptr<Operation>> operations;
    for (const MessageRequest& image : on_host) operations.push_back(staging_->submit(image));
    for (const auto& operation : operations) staging_->wait(operation, std::nullopt, nullptr);
  };
  host_.begin(0, work, is_captured(), stream);
  host_.end(0, stream);
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!batch[i].receives) continue;
    const Block& image = on_host[i].block;
    copy(image.data, batch[i].block.data, image.count * size_of(batch[i].dtype), stream);
  }
}

}  // namespace pycoll::cuda
