// What torch asks of a device's tensors: memory, views and copies. All else is done by its CPU
// kernels on copies (`fallback`).
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>

#include "device.h"

namespace pycoll::simgpu {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool is_here(const at::Tensor& tensor) {
  return tensor.device().type() == kSimGpu;
}

c10::DeviceIndex index_of(const std::optional<at::Device>& device) {
  return device && device->has_index() ? device->index() : current_device();
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<at::MemoryFormat> format) {
  const DeviceScope scope(index_of(device));
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> device, std::optional<bool> /*pinned*/) {
  const DeviceScope scope(index_of(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

// ---- Copies: on the current stream of the tensor's device. ----

// From the first element in memory to the last, whatever lies between.
size_t span_of(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

// A CPU tensor of the same shape, strides and so on, whose elements are not set.
at::Tensor host_like(const at::Tensor& tensor) {
  const at::Tensor bytes =
      at::empty({static_cast<int64_t>(span_of(tensor))}, at::TensorOptions(at::kByte));
  at::Tensor host = at::from_blob(
      bytes.data_ptr(), tensor.sizes(), tensor.strides(), [bytes](void*) {},
      at::TensorOptions(tensor.scalar_type()));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

void copy_span(const at::Tensor& to, const at::Tensor& from) {
  const at::Tensor& here = is_here(to) ? to : from;
  const DeviceScope scope(here.device().index());
  SIMGPU_CHECK(cudaMemcpyAsync(to.data_ptr(), from.const_data_ptr(), span_of(from),
                               cudaMemcpyDefault, handle_of(current_stream(current_device()))));
}

void synchronize(const at::Tensor& tensor) {
  const DeviceScope scope(tensor.device().index());
  SIMGPU_CHECK(cudaStreamSynchronize(handle_of(current_stream(current_device()))));
}

at::Tensor to_host(const at::Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  at::Tensor host = host_like(tensor);
  if (tensor.numel() == 0) return host;
  copy_span(host, tensor);
  synchronize(tensor);
  return host;
}

// Their memory is the same, element for element and byte for byte.
bool are_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// Copies to the device, and within it, are asynchronous. To the host too where that is asked for
// and the memory is page-locked: the caller then has to synchronise, as with CUDA.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (are_alike(from, to)) {
    const bool two_devices = is_here(from) && is_here(to) && from.device() != to.device();
    if (two_devices) synchronize(from);
    copy_span(to, from);
    const bool to_host = !is_here(to) && !(non_blocking && is_pinned(to.const_data_ptr()));
    if (to_host) synchronize(from);
    if (two_devices) synchronize(to);
    return to;
  }
  if (!is_here(to)) return to.copy_(to_host(from));
  // What lies between the elements stays.
  const at::Tensor host = to.is_non_overlapping_and_dense() ? host_like(to) : to_host(to);
  host.copy_(to_host(from));
  copy_span(to, host);
  return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar to_scalar(const at::Tensor& tensor) {
  return to_host(tensor).item();
}

at::Tensor& fill(at::Tensor& tensor, const at::Scalar& value) {
  if (!tensor.is_non_overlapping_and_dense()) {
    copy_from(to_host(tensor).fill_(value), tensor, false);
  } else if (tensor.numel() > 0) {  // without reading: asynchronous
    copy_from(host_like(tensor).fill_(value), tensor, false);
  }
  return tensor;
}

at::Tensor& zero(at::Tensor& tensor) {
  return fill(tensor, 0);
}

// ---- Views and storages. ----

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

void resize_storage(const at::Tensor& tensor, size_t bytes) {
  at::Storage storage = tensor.storage();
  if (bytes <= storage.nbytes()) return;
  const DeviceScope scope(tensor.device().index());
  c10::DataPtr bigger = device_allocator().allocate(bytes);
  if (storage.nbytes() > 0) {
    device_allocator().copy_data(bigger.get(), storage.data(), storage.nbytes());
  }
  storage.set_data_ptr_noswap(std::move(bigger));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "simgpu: resize_ is contiguous");
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (tensor.numel() > 0) {
    resize_storage(tensor, at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(),
                                                                      tensor.storage_offset()));
  }
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::native::checkSetStorage(tensor, std::move(source), offset, sizes, strides);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.data() != nullptr) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  } else {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / tensor.itemsize());
  return set_storage(tensor, std::move(source), 0, {elements}, {});
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record_use(tensor.storage().data_ptr(), stream);
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Copies know lazily conjugated and negated tensors; by default torch would resolve them first, by
// a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &to_scalar);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("record_stream", &record_stream);
}

}  // namespace
}  // namespace pycoll::simgpu
