// Tensors as the core wants them: checks, types, dense memory. Included by backend.cpp only: every
// translation unit that includes torch costs ten seconds.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <utility>
#include <vector>

#include "core/error.h"
#include "runtime/operation.h"

namespace pycoll::torch_adapter {

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
    {at::kFloat8_e4m3fn, DType::float8_e4m3fn},
    {at::kFloat8_e5m2, DType::float8_e5m2},
};

inline DType dtype_of(const at::Tensor& tensor) {
  for (const ScalarTypeRow& row : kScalarTypes) {
    if (row.torch == tensor.scalar_type()) return row.pycoll;
  }
  C10_THROW_ERROR(NotImplementedError, concat("pycoll cannot move elements of type ",
                                              c10::toString(tensor.scalar_type())));
}

struct ReduceOpRow {
  c10d::ReduceOp::RedOpType torch;
  ReduceOp pycoll;
};

constexpr ReduceOpRow kReduceOps[] = {
    {c10d::ReduceOp::SUM, ReduceOp::sum},
    {c10d::ReduceOp::AVG, ReduceOp::avg},
    {c10d::ReduceOp::PRODUCT, ReduceOp::product},
    {c10d::ReduceOp::MIN, ReduceOp::min},
    {c10d::ReduceOp::MAX, ReduceOp::max},
    {c10d::ReduceOp::BAND, ReduceOp::band},
    {c10d::ReduceOp::BOR, ReduceOp::bor},
    {c10d::ReduceOp::BXOR, ReduceOp::bxor},
    {c10d::ReduceOp::PREMUL_SUM, ReduceOp::premul_sum},
};

inline ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  for (const ReduceOpRow& row : kReduceOps) {
    if (row.torch == op.op_) return row.pycoll;
  }
  C10_THROW_ERROR(NotImplementedError, "pycoll does not know this reduce operation");
}

inline CallRequest request_for(Collective collective, const at::Tensor& tensor) {
  CallRequest request;
  request.collective = collective;
  request.dtype = dtype_of(tensor);
  return request;
}

// True unless sizes and strides show that no two elements share memory (sufficient, not necessary:
// what cannot be shown is refused).
inline bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_contiguous()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

enum class Access { read, write };

inline void check_tensor(const char* operation, const char* name, const at::Tensor& tensor,
                         Access access) {
  const auto refuse = [&](const std::string& why) {
    C10_THROW_ERROR(Error, concat("pycoll ", operation, ": ", name, " ", why));
  };
  if (!tensor.defined()) refuse("is an undefined tensor");
  if (tensor.layout() != at::kStrided) {
    refuse(concat("has layout ", tensor.layout(), "; only dense (strided) tensors are supported"));
  }
  if (!tensor.device().is_cpu()) {
    refuse(concat("is on device ", tensor.device().str(),
                  "; this group moves CPU tensors (the CUDA path is not built)"));
  }
  if (access == Access::write && overlaps_itself(tensor)) {
    refuse(concat("of shape ", tensor.sizes(), " and strides ", tensor.strides(),
                  " has elements that share memory (an expanded or overlapping view); "
                  "call .contiguous() or .clone() first"));
  }
}

// Whether an element of one tensor lies `distance` elements from an element of the other, where
// both have these dims (stride, size), ascending and without self-overlap. A dim contributes stride
// times a number in -(size-1)..size-1, and all smaller dims together less than one stride: two
// numbers to try.
inline bool meets(int64_t distance, const std::vector<std::pair<int64_t, int64_t>>& dims,
                  size_t left) {
  if (left == 0) return distance == 0;
  const auto [stride, size] = dims[left - 1];
  for (int64_t steps = distance / stride - 1; steps <= distance / stride + 1; ++steps) {
    if (std::abs(steps) < size && meets(distance - steps * stride, dims, left - 1)) return true;
  }
  return false;
}

// True when two outputs share an element, or when that cannot be told.
inline bool may_share_elements(const at::Tensor& a, const at::Tensor& b) {
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
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1) dims.emplace_back(a.stride(i), a.size(i));
  }
  std::sort(dims.begin(), dims.end());
  return meets(distance / element, dims, dims.size());
}

// Strided outputs travel as dense copies, so the core cannot see that they share elements.
inline void check_disjoint(const char* title, const std::vector<at::Tensor>& outputs) {
  const bool dense = std::all_of(outputs.begin(), outputs.end(),
                                 [](const at::Tensor& t) { return t.is_contiguous(); });
  if (dense) return;
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (may_share_elements(outputs[i], outputs[j])) {
        C10_THROW_ERROR(Error, concat(title, ": outputs ", j, " and ", i,
                                      " share memory (overlapping views); give each its own"));
      }
    }
  }
}

inline const at::Tensor& only_tensor(const char* operation,
                                     const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != 1) {
    C10_THROW_ERROR(Error, concat("pycoll ", operation, ": one tensor a call is supported, got ",
                                  tensors.size()));
  }
  return tensors[0];
}

inline const std::vector<at::Tensor>& only_list(const char* operation,
                                                const std::vector<std::vector<at::Tensor>>& lists) {
  if (lists.size() != 1) {
    C10_THROW_ERROR(Error, concat("pycoll ", operation,
                                  ": one list of tensors a call is supported, got ", lists.size()));
  }
  return lists[0];
}

// A list with one tensor a rank, each like `single`.
inline void check_list(const char* operation, const char* name, const std::vector<at::Tensor>& list,
                       const at::Tensor& single, int world_size, Access access) {
  if (list.size() != static_cast<size_t>(world_size)) {
    C10_THROW_ERROR(Error, concat("pycoll ", operation, ": the ", name, " list has ", list.size(),
                                  " tensors, the group has ", world_size, " ranks"));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    check_tensor(operation, concat(name, " ", i).c_str(), list[i], access);
    if (list[i].numel() != single.numel() || list[i].scalar_type() != single.scalar_type()) {
      C10_THROW_ERROR(
          Error, concat("pycoll ", operation, ": ", name, " ", i, " has shape ", list[i].sizes(),
                        " and type ", list[i].scalar_type(), ", expected ", single.sizes(), " and ",
                        single.scalar_type(), " (all ranks must have the same shape and type)"));
    }
  }
}

// A tensor that holds world_size tensors like `single`, one after the other.
inline void check_stacked(const char* operation, const char* name, const at::Tensor& stacked,
                          const char* single_name, const at::Tensor& single, int world_size) {
  if (stacked.numel() != single.numel() * world_size ||
      stacked.scalar_type() != single.scalar_type()) {
    C10_THROW_ERROR(Error, concat("pycoll ", operation, ": ", name, " has ", stacked.numel(),
                                  " elements of type ", stacked.scalar_type(), ", expected ",
                                  single.numel() * world_size, " of type ", single.scalar_type(),
                                  ": world size ", world_size, " times ", single_name, " of shape ",
                                  single.sizes()));
  }
}

// Dense memory for some tensors: their own where they are contiguous, else copies.
class DenseTensors {
 public:
  enum class Role { input, output };

  // `same` are tensors already made dense: one that is given again is not copied twice.
  DenseTensors(const std::vector<at::Tensor>& tensors, Role role,
               const DenseTensors* same = nullptr)
      : original_(tensors), role_(role) {
    // No autograd, also for leaves that require grad and for inference tensors.
    const at::AutoDispatchBelowAutograd guard;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& tensor = tensors[i];
      const bool given_again = same != nullptr && same->original_.size() == tensors.size() &&
                               same->original_[i].is_same(tensor);
      if (given_again) {
        dense_.push_back(same->dense_[i]);
      } else {
        dense_.push_back(tensor.is_contiguous() ? tensor : tensor.contiguous());
      }
    }
  }

  bool any_copied() const {
    for (size_t i = 0; i < dense_.size(); ++i) {
      if (!dense_[i].is_same(original_[i])) return true;
    }
    return false;
  }

  void copy_back() const {
    // In the driving thread, which may be the progress thread: inference tensors may be written
    // only in inference mode, and ordinary ones may too.
    const c10::InferenceMode guard;
    for (size_t i = 0; i < dense_.size(); ++i) {
      if (!dense_[i].is_same(original_[i])) original_[i].copy_(dense_[i]);
    }
  }

  // `blocks` blocks: one a tensor, or equal parts of one tensor.
  VectorView view(int blocks) const {
    VectorView view;
    for (const at::Tensor& tensor : dense_) {
      // data_ptr() of an output makes a copy-on-write tensor its own; inputs must not pay for that.
      const void* data = role_ == Role::output ? tensor.data_ptr() : tensor.const_data_ptr();
      auto* block = static_cast<std::byte*>(const_cast<void*>(data));
      const int parts = blocks / static_cast<int>(dense_.size());
      const auto count = static_cast<uint64_t>(tensor.numel() / parts);
      for (int i = 0; i < parts; ++i) {
        view.blocks.push_back({block, count});
        block += count * tensor.element_size();
      }
    }
    return view;
  }

 private:
  std::vector<at::Tensor> original_;
  std::vector<at::Tensor> dense_;
  Role role_;
};

}  // namespace pycoll::torch_adapter
