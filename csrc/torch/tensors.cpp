#include "torch/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

struct ScalarTypeRow {
  at::ScalarType torch;
  DType pycoll;
};

constexpr ScalarTypeRow kScalarTypes[] = {
    {at::kFloat, DType::float32},
    {at::kDouble, DType::float64},
    {at::kHalf, DType::float16},
    {at::kBFloat16, DType::bfloat16},
    {at::kLong, DType::int64},
    {at::kInt, DType::int32},
    {at::kByte, DType::uint8},
    {at::kChar, DType::int8},
    {at::kShort, DType::int16},
    {at::kBool, DType::bool8},
    {at::kUInt16, DType::uint16},
    {at::kUInt32, DType::uint32},
    {at::kUInt64, DType::uint64},
    {at::kComplexFloat, DType::complex64},
    {at::kComplexDouble, DType::complex128},
    {at::kComplexHalf, DType::complex32},
    {at::kFloat8_e4m3fn, DType::float8_e4m3fn},
    {at::kFloat8_e5m2, DType::float8_e5m2},
    {at::kFloat8_e4m3fnuz, DType::float8_e4m3fnuz},
    {at::kFloat8_e5m2fnuz, DType::float8_e5m2fnuz},
    {at::kFloat8_e8m0fnu, DType::float8_e8m0fnu},
    {at::ScalarType::Float4_e2m1fn_x2, DType::float4_e2m1fn_x2},
};

using Dims = std::vector<std::pair<int64_t, int64_t>>;  // stride, size; ascending

Dims dims_of(const at::Tensor& tensor) {
  Dims dims;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  return dims;
}

// True unless sizes and strides show that no two elements share memory
// (sufficient, not necessary: what cannot be shown is refused).
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_contiguous()) return false;
  int64_t reach = 0;
  for (const auto& [stride, size] : dims_of(tensor)) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

// Whether an element of one tensor lies `distance` elements from an element of
// the other, where both have these dims, without self-overlap. A dim
// contributes stride times a number in
// -(size-1)..size-1, and all smaller dims together less than one stride: two
// numbers to try.
bool meets(int64_t distance, const Dims& dims, size_t left) {
  if (left == 0) return distance == 0;
  const auto [stride, size] = dims[left - 1];
  for (int64_t steps = distance / stride - 1; steps <= distance / stride + 1; ++steps) {
    if (std::abs(steps) < size && meets(distance - steps * stride, dims, left - 1)) return true;
  }
  return false;
}

// True when two outputs share an element, or when that cannot be told.
bool may_share_elements(const at::Tensor& a, const at::Tensor& b) {
  const auto begin = [](const at::Tensor& t) {
    return static_cast<const char*>(t.const_data_ptr());
  };
  const auto reach = [](const at::Tensor& t) {
    int64_t elements = 1;
    for (int64_t i = 0; i < t.dim(); ++i) elements += t.stride(i) * (t.size(i) - 1);
    return elements * static_cast<int64_t>(t.element_size());
  };
  if (a.numel() == 0 || b.numel() == 0) return false;
  if (begin(a) + reach(a) <= begin(b) || begin(b) + reach(b) <= begin(a)) return false;
  const int64_t distance = begin(b) - begin(a);
  const auto element = static_cast<int64_t>(a.element_size());
  if (a.strides() != b.strides() || a.sizes() != b.sizes() || distance % element != 0) return true;
  const Dims dims = dims_of(a);
  return meets(distance / element, dims, dims.size());
}

at::Tensor dense_input(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

at::Tensor dense_output(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor : at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

}  // namespace

std::optional<DType> find_dtype(at::ScalarType type) {
  for (const ScalarTypeRow& row : kScalarTypes) {
    if (row.torch == type) return row.pycoll;
  }
  return std::nullopt;
}

DType dtype_of(const char* operation, const at::Tensor& tensor) {
  if (const auto known = find_dtype(tensor.scalar_type())) return *known;
  C10_THROW_ERROR(NotImplementedError,
                  concat(operation, ": elements of type ", c10::toString(tensor.scalar_type()),
                         " cannot be moved"));
}

void check_tensor(const char* operation, const std::string& name, const at::Tensor& tensor,
                  Access access) {
  if (!tensor.defined()) refuse(operation, name, " is an undefined tensor");
  if (tensor.layout() != at::kStrided) {
    refuse(operation, name, " has layout ", tensor.layout(),
           "; only dense (strided) tensors are supported");
  }
  if (tensor.device().is_meta()) {
    refuse(operation, name, " is on device meta: it has no data to move");
  }
  if (access == Access::write && overlaps_itself(tensor)) {
    refuse(operation, name, " of shape ", tensor.sizes(), " and strides ", tensor.strides(),
           " has elements that share memory (an expanded or overlapping view); "
           "call .contiguous() or .clone() first");
  }
}

void check_disjoint(const char* operation, const Tensors& outputs) {
  if (std::all_of(outputs.begin(), outputs.end(), is_plain)) return;
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (may_share_elements(outputs[i], outputs[j])) {
        refuse(operation, "outputs ", j, " and ", i,
               " share memory (overlapping views); give each its own");
      }
    }
  }
}

const at::Tensor& only_tensor(const char* operation, const Tensors& tensors) {
  if (tensors.size() != 1) {
    refuse(operation, "one tensor a call is supported, got ", tensors.size());
  }
  return tensors[0];
}

const Tensors& only_list(const char* operation, const std::vector<Tensors>& lists) {
  if (lists.size() != 1) {
    refuse(operation, "one list of tensors a call is supported, got ", lists.size());
  }
  return lists[0];
}

void check_list(const ListCheck& what, const Tensors& list, const at::Tensor& single,
                int world_size) {
  if (list.size() != static_cast<size_t>(world_size)) {
    refuse(what.operation, "the ", what.name, " list has ", list.size(), " tensors, the group has ",
           world_size, " ranks");
  }
  for (size_t i = 0; i < list.size(); ++i) {
    check_tensor(what.operation, concat(what.name, " ", i), list[i], what.access);
    if (list[i].scalar_type() != single.scalar_type()) {
      refuse(what.operation, what.name, " ", i, " has type ", list[i].scalar_type(), ", expected ",
             single.scalar_type(), ": all tensors of a call must have one type");
    }
  }
}

void check_stacked(const StackCheck& what, const at::Tensor& stacked, const at::Tensor& single,
                   int world_size) {
  if (stacked.scalar_type() != single.scalar_type()) {
    refuse(what.operation, what.name, " has type ", stacked.scalar_type(), ", ", what.single_name,
           " has type ", single.scalar_type(), "; they must be the same");
  }
  if (stacked.numel() != single.numel() * world_size) {
    refuse(what.operation, what.name, " of shape ", stacked.sizes(), " has ", stacked.numel(),
           " elements, expected ", single.numel() * world_size, ": world size ", world_size,
           " times ", what.single_name, " of shape ", single.sizes());
  }
}

BlockLengths equal_lengths(const at::Tensor& tensor, int parts) {
  return BlockLengths(static_cast<size_t>(parts), static_cast<uint64_t>(tensor.numel() / parts));
}

BlockLengths split_lengths(const char* name, const at::Tensor& tensor,
                           const std::vector<int64_t>& splits, int world_size) {
  constexpr auto kOperation = "pycoll:all_to_all";
  if (tensor.dim() == 0) refuse(kOperation, name, " has no dimension 0 to split");
  const int64_t rows = tensor.size(0);
  if (splits.empty()) {
    if (rows % world_size != 0) {
      refuse(kOperation, name, " of shape ", tensor.sizes(),
             ": dim 0 does not divide equally across ", world_size,
             " ranks; give split sizes (Split sizes)");
    }
    return equal_lengths(tensor, world_size);
  }
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (split < 0)
      refuse(kOperation, "Split sizes of ", name,
             " must not be negative: ", at::IntArrayRef(splits));
    sum += split;
  }
  if (splits.size() != static_cast<size_t>(world_size) || sum != rows) {
    refuse(kOperation, "Split sizes ", at::IntArrayRef(splits), " of ", name,
           " do not match: shape ", tensor.sizes(), " has ", rows, " rows in dim 0, the group has ",
           world_size, " ranks");
  }
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  BlockLengths lengths;
  for (const int64_t split : splits) lengths.push_back(static_cast<uint64_t>(split * row));
  return lengths;
}

DenseTensors::DenseTensors(const Tensors& tensors, Role role, const DenseTensors* same)
    : original_(tensors), role_(role) {
  // No autograd, also for leaves that require grad and for inference tensors.
  const at::AutoDispatchBelowAutograd guard;
  const bool given_again = same != nullptr && tensors.size() == 1 && same->original_.size() == 1 &&
                           same->original_[0].is_same(tensors[0]);
  for (const at::Tensor& tensor : tensors) {
    if (given_again) {
      dense_.push_back(same->dense_[0]);
    } else {
      dense_.push_back(role == Role::input ? dense_input(tensor) : dense_output(tensor));
    }
  }
}

bool DenseTensors::any_copied() const {
  for (size_t i = 0; i < dense_.size(); ++i) {
    if (!dense_[i].is_same(original_[i])) return true;
  }
  return false;
}

void DenseTensors::append_copies(Tensors& copies) const {
  for (size_t i = 0; i < dense_.size(); ++i) {
    if (!dense_[i].is_same(original_[i])) copies.push_back(dense_[i]);
  }
}

void DenseTensors::copy_back() const {
  // Inference tensors may be written only in inference mode, and ordinary ones
  // may too.
  const c10::InferenceMode guard;
  for (size_t i = 0; i < dense_.size(); ++i) {
    if (!dense_[i].is_same(original_[i])) original_[i].copy_(dense_[i]);
  }
}

VectorView DenseTensors::view(const BlockLengths& lengths) const {
  VectorView view;
  for (const at::Tensor& tensor : dense_) {
    // data_ptr() of an output makes a copy-on-write tensor its own; inputs must
    // not pay for that.
    const void* data = role_ == Role::output ? tensor.data_ptr() : tensor.const_data_ptr();
    auto* begin = static_cast<std::byte*>(const_cast<void*>(data));
    if (lengths.empty()) {
      view.blocks.push_back({begin, static_cast<uint64_t>(tensor.numel())});
      continue;
    }
    for (const uint64_t count : lengths) {
      view.blocks.push_back({begin, count});
      if (begin != nullptr) begin += count * tensor.element_size();
    }
  }
  return view;
}

}  // namespace pycoll::torch_adapter
