// Messages of GPU tensors that travel alone: through host memory and the CPU communicator.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "python/gil.h"
#include "torch/device.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

using c10::impl::VirtualGuardImpl;

// Page-locked, so that copies between it and the GPU need no detour.
at::Tensor pinned(at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, at::TensorOptions(type).device(at::kCPU).pinned_memory(true));
}

Block block_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<uint64_t>(tensor.numel())};
}

at::Tensor bytes_on(c10::Device device, uint64_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
}

// What the message carries of the tensor, on the GPU; by the current stream.
at::Tensor code_of(const at::Tensor& tensor, const MessageCoding& coding, DType dtype,
                   const DeviceLibrary& library) {
  const c10::Device device = tensor.device();
  const at::Tensor dense = tensor.contiguous();
  const Block values = block_of(dense);
  at::Tensor code = bytes_on(device, code_bytes(coding.codec, values.count));
  void* stream = VirtualGuardImpl(device.type()).getStream(device).native_handle();
  library.encode({coding.codec, coding.key, dtype, values.data, values.count, block_of(code).data},
                 device.index(), stream);
  return code;
}

// Into the tensor, by the current stream.
void decode_into(at::Tensor& tensor, const at::Tensor& host, const Codec& codec, DType dtype,
                 const DeviceLibrary& library) {
  const c10::Device device = tensor.device();
  at::Tensor code = bytes_on(device, static_cast<uint64_t>(host.numel()));
  code.copy_(host, /*non_blocking=*/true);
  at::Tensor dense = tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
  const Block values = block_of(dense);
  const std::byte* const codes = block_of(code).data;
  void* stream = VirtualGuardImpl(device.type()).getStream(device).native_handle();
  library.decode({codec, &codes, 1, dtype, values.data, values.count, 1}, device.index(), stream);
  if (!dense.is_same(tensor)) tensor.copy_(dense);
}

}  // namespace

c10::intrusive_ptr<c10d::Work> DeviceCalls::send(Description description, MessageRequest request,
                                                 const std::optional<MessageCoding>& coding) {
  const at::Tensor tensor = description.inputs[0];
  std::shared_ptr<DeviceLibrary> library;
  with_torch_errors([&] { library = library_for(tensor.device()); });
  auto work = c10::make_intrusive<Work>(control_, std::move(description), interrupt_);
  const GilRelease release;
  const c10::DeviceGuard guard(tensor.device());
  const at::AutoDispatchBelowAutograd no_autograd;
  at::Tensor carried = tensor;
  if (coding)
    with_torch_errors([&] { carried = code_of(tensor, *coding, request.dtype, *library); });
  at::Tensor host = pinned(carried.sizes(), carried.scalar_type());
  host.copy_(carried);  // when this returns it is there
  request.block = {block_of(host).data, static_cast<uint64_t>(tensor.numel())};
  if (coding) make_code(request, coding->codec, request.block.data);
  request.keep_alive = std::make_shared<at::Tensor>(std::move(host));
  with_torch_errors([&] { work->submit(std::move(request)); });
  return work;
}

c10::intrusive_ptr<c10d::Work> DeviceCalls::receive(Description description, MessageRequest request,
                                                    const std::optional<MessageCoding>& coding) {
  const at::Tensor tensor = description.outputs[0];
  const c10::Device device = tensor.device();
  std::shared_ptr<DeviceLibrary> library;
  with_torch_errors([&] { library = library_for(device); });
  const c10::DeviceGuard guard(device);
  StagedReceive::Staging staging{
      {}, tensor, recorded(VirtualGuardImpl(device.type()).getStream(device)), {}};
  const auto count = static_cast<uint64_t>(tensor.numel());
  if (coding) {
    const auto bytes = static_cast<int64_t>(code_bytes(coding->codec, count));
    staging.host = pinned({bytes}, at::kByte);
    staging.deliver = [codec = coding->codec, dtype = request.dtype, library](
                          at::Tensor& to, const at::Tensor& host) {
      decode_into(to, host, codec, dtype, *library);
    };
  } else {
    staging.host = pinned(tensor.sizes(), tensor.scalar_type());
  }
  request.block = {block_of(staging.host).data, count};
  if (coding) make_code(request, coding->codec, request.block.data);
  request.keep_alive = std::make_shared<at::Tensor>(staging.host);
  // Profilers are shown the one that is returned.
  auto message = c10::make_intrusive<Work>(
      control_, Description{description.rank, description.type, nullptr, {}, {}}, interrupt_);
  with_torch_errors([&] { message->submit(std::move(request)); });
  return StagedReceive::make(std::move(description), std::move(message), std::move(staging));
}

}  // namespace pycoll::torch_adapter
