// Tensors as the core wants them: types, checks, dense memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/operation.h"

namespace pycoll::torch_adapter {

using Tensors = std::vector<at::Tensor>;

// The core's type for a tensor's elements; throws where it has none.
DType dtype_of(const char* operation, const at::Tensor& tensor);

std::optional<DType> find_dtype(at::ScalarType type);

// Its memory holds its elements in order, and nothing else.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

enum class Access { read, write };

// Refuses what cannot be read or written: undefined, sparse, on a device without
// memory; for writing also views whose elements share memory.
void check_tensor(const char* operation, const std::string& name, const at::Tensor& tensor,
                  Access access);

// Strided outputs travel as dense copies, so the core cannot see that they
// share elements.
void check_disjoint(const char* operation, const Tensors& outputs);

// torch passes lists with one entry a device; only one is served.
const at::Tensor& only_tensor(const char* operation, const Tensors& tensors);
const Tensors& only_list(const char* operation, const std::vector<Tensors>& lists);

// A list of one tensor a rank, all of the type of `single`. Lengths are not
// looked at.
struct ListCheck {
  const char* operation;
  const char* name;  // of the list, "output"
  Access access;
};
void check_list(const ListCheck& what, const Tensors& list, const at::Tensor& single,
                int world_size);

// A tensor that holds world_size tensors like `single`, one after the other,
// whatever its shape.
struct StackCheck {
  const char* operation;
  const char* name;  // of the tensor that holds them all
  const char* single_name;
};
void check_stacked(const StackCheck& what, const at::Tensor& stacked, const at::Tensor& single,
                   int world_size);

// Numbers of elements of the blocks that a tensor is cut into.
using BlockLengths = std::vector<uint64_t>;
BlockLengths equal_lengths(const at::Tensor& tensor, int parts);
// What rows `splits` of dim 0 hold; no splits: equal parts. Throws when they do
// not add up.
BlockLengths split_lengths(const char* name, const at::Tensor& tensor,
                           const std::vector<int64_t>& splits, int world_size);

// Dense memory for some tensors: their own where that is dense and plain, else
// copies. (A tensor may be a lazily conjugated or negated view: its memory does
// not hold its values.)
class DenseTensors {
 public:
  enum class Role { input, output };

  // `same` are tensors already made dense: a single one that is given again is
  // not copied twice.
  DenseTensors(const Tensors& tensors, Role role, const DenseTensors* same = nullptr);

  bool any_copied() const;
  void append_copies(Tensors& copies) const;
  // Copies results to where they belong. By the driving thread, which may be a
  // progress thread.
  void copy_back() const;
  // One block a tensor; or, of a single tensor, blocks of these lengths.
  VectorView view(const BlockLengths& lengths = {}) const;

 private:
  Tensors original_;
  Tensors dense_;
  Role role_;
};

}  // namespace pycoll::torch_adapter
