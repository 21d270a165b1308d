// Messages as torch sends them. Their timeout is the group's: torch gives none.
#include <c10/core/DeviceGuard.h>

#include "python/gil.h"
#include "torch/backend.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

void check_peer(const char* operation, int peer, int rank, int world_size) {
  if (peer < 0 || peer >= world_size) {
    refuse(operation, "rank ", peer, " is not a rank of this group of ", world_size);
  }
  if (peer == rank) {
    // What torch itself raises, which checks some calls and not others.
    C10_THROW_ERROR(ValueError, concat(operation, ": rank ", peer,
                                       " is the same as the rank of this process; "
                                       "there is no message to oneself"));
  }
}

}  // namespace

Backend::WorkPtr Backend::start_message(const char* title, c10d::OpType type, Tensors& tensors,
                                        MessageRequest request) {
  const at::Tensor& tensor = only_tensor(title, tensors);
  check_tensor(title, "tensor", tensor, request.receives ? Access::write : Access::read);
  request.dtype = dtype_of(title, tensor);
  if (const auto gpu = gpu_of(title, tensors, {})) {
    return start_message_on(*gpu, {getRank(), type, title, tensors, tensors}, std::move(request));
  }
  const DenseTensors dense(
      tensors, request.receives ? DenseTensors::Role::output : DenseTensors::Role::input);
  request.block = dense.view().blocks[0];
  if (dense.any_copied() && request.receives) {
    request.finalize = [dense] { dense.copy_back(); };
  } else if (dense.any_copied()) {
    request.keep_alive = std::make_shared<DenseTensors>(dense);
  }
  Description description{getRank(), type, title, tensors, tensors};
  auto work = c10::make_intrusive<Work>(communicator_, std::move(description), interrupt_);
  with_torch_errors([&] { work->submit(as_region_says(std::move(request))); });
  return remember(work);
}

// Of a message of so many values.
CodecWord Backend::codec_of_message(const MessageRequest& request, uint64_t count) const {
  const CodecWord codec = request_.regions->here().value_or(std::nullopt);
  const bool served = codec && can_encode(request.dtype);
  if (!served || count * size_of(request.dtype) < request_.codec_min_bytes) return std::nullopt;
  return codec;
}

MessageRequest Backend::as_region_says(MessageRequest request) const {
  const CodecWord codec = codec_of_message(request, request.block.count);
  if (!codec) return request;
  return codecs_->coded(std::move(request), *codec);
}

Backend::WorkPtr Backend::start_message_on(c10::Device device, Description description,
                                           MessageRequest request) {
  const auto count = static_cast<uint64_t>(description.inputs[0].numel());
  const CodecWord codec = codec_of_message(request, count);
  // Codes go through host memory, where their two ranks compare them.
  const bool batched = request.peer != kAnySource && !codec;
  if (const std::lock_guard lock(coalescing_mutex_); coalescing_.open && batched) {
    const c10::DeviceGuard guard(device);
    const auto role = request.receives ? DenseTensors::Role::output : DenseTensors::Role::input;
    DenseTensors dense(description.inputs, role);
    request.block = dense.view().blocks[0];
    if (dense.any_copied() && request.receives) request.finalize = [dense] { dense.copy_back(); };
    coalescing_.batch.push_back({std::move(request), description.inputs[0], std::move(dense)});
    return nullptr;
  }
  request.timeout = time_limit(options_->timeout);
  try {
    std::optional<MessageCoding> coding;
    if (codec) with_torch_errors([&] { coding = codecs_->coding_of(request, *codec); });
    const auto start = request.receives ? &DeviceCalls::receive : &DeviceCalls::send;
    return remember(
        ((*devices_).*start)(std::move(description), std::move(request), std::move(coding)));
  } catch (const c10::Error& error) {
    const GilRelease release;
    devices_->note_error(device, error);
    throw;
  }
}

Backend::WorkPtr Backend::run_batch(std::vector<DeviceMessage> batch) {
  if (batch.empty()) return nullptr;
  constexpr auto kTitle = "pycoll:batch_isend_irecv";
  Description description{getRank(), c10d::OpType::COALESCED, kTitle, {}, {}};
  Tensors copies;
  std::vector<MessageRequest> messages;
  for (DeviceMessage& message : batch) {
    Tensors& side = message.request.receives ? description.outputs : description.inputs;
    side.push_back(message.tensor);
    message.dense.append_copies(copies);
    messages.push_back(std::move(message.request));
  }
  const auto gpu = gpu_of(kTitle, description.inputs, description.outputs);
  DeviceCall call{kTitle, std::move(description), gpu.value(), options_->timeout, true};
  call.messages = std::move(messages);
  call.copies = std::move(copies);
  return devices_->run(std::move(call));
}

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  constexpr auto kTitle = "pycoll:send";
  check_peer(kTitle, peer, getRank(), getSize());
  MessageRequest request;
  request.peer = peer;
  request.tag = tag;
  return start_message(kTitle, c10d::OpType::SEND, tensors, std::move(request));
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  constexpr auto kTitle = "pycoll:recv";
  check_peer(kTitle, peer, getRank(), getSize());
  MessageRequest request;
  request.receives = true;
  request.peer = peer;
  request.tag = tag;
  return start_message(kTitle, c10d::OpType::RECV, tensors, std::move(request));
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  MessageRequest request;
  request.receives = true;
  request.peer = kAnySource;
  request.tag = tag;
  return start_message("pycoll:recvAnySource", c10d::OpType::RECVANYSOURCE, tensors,
                       std::move(request));
}

}  // namespace pycoll::torch_adapter
