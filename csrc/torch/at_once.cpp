// The short way of a synchronous call on plain tensors: checked here as far as it goes without
// allocating anything; what is not plain, or wrong, takes the ordinary way and is told there.
#include <ATen/record_function.h>

#include "python/gil.h"
#include "torch/backend.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

bool is_plain_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
         is_plain(tensor);
}

// The tensor as `blocks` blocks of one length; false when it does not divide.
bool cut(const at::Tensor& tensor, int blocks, PlainCall::Vector& vector) {
  const auto count = static_cast<uint64_t>(tensor.numel());
  vector.blocks = static_cast<uint32_t>(blocks);
  vector.block_count = count / vector.blocks;
  return vector.block_count * vector.blocks == count;
}

}  // namespace

bool Backend::run_at_once(const PlainTensors& tensors) {
  // Whoever profiles is shown every call, by the ordinary way.
  if (tensors.async || at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) return false;
  if (request_.codec || request_.regions->any() || !codecs_->idle()) return false;
  if (hook_->is_set()) return false;
  const at::Tensor* const known = tensors.input != nullptr ? tensors.input : tensors.output;
  PlainCall call{tensors.collective, DType::uint8, tensors.reduce_op, tensors.root, {}, {}, {}};
  const int world = getSize();
  const CollectiveTraits& traits = traits_of(tensors.collective);
  if (known != nullptr) {
    const auto dtype = find_dtype(known->scalar_type());
    if (!dtype) return false;
    call.dtype = *dtype;
  }
  // Outputs first: taking the address for writing may move a copy-on-write tensor that is also the
  // input.
  if (tensors.output != nullptr) {
    const at::Tensor& output = *tensors.output;
    if (!is_plain_cpu(output) || output.scalar_type() != known->scalar_type()) return false;
    if (!cut(output, traits.output == Parts::world ? world : 1, call.output)) return false;
    call.output.data = static_cast<std::byte*>(output.mutable_data_ptr());
  }
  if (tensors.input != nullptr) {
    const at::Tensor& input = *tensors.input;
    if (!is_plain_cpu(input)) return false;
    if (!cut(input, traits.input == Parts::world ? world : 1, call.input)) return false;
    call.input.data = static_cast<std::byte*>(const_cast<void*>(input.const_data_ptr()));
  }
  if (tensors.timeout != c10d::kUnsetTimeout) call.timeout = time_limit(tensors.timeout);
  const GilRelease release;
  return with_torch_errors([&] { return communicator_->run_at_once(call, interrupt_); });
}

}  // namespace pycoll::torch_adapter
