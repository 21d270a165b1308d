#include "kernels/cuda/fused.h"

namespace pycoll::cuda {
namespace {

void add_row(std::vector<TensorRow>& rows, TensorTable* table, TensorRow row) {
  if (row.count == 0) return;
  row.first_chunk = table->chunks;
  rows.push_back(row);
  table->tensors += 1;
  table->chunks += (row.count + kSumChunk - 1) / kSumChunk;
}

}  // namespace

std::vector<TensorRow> rows_of(const TensorList& list, TensorTable* table) {
  std::vector<TensorRow> rows;
  *table = {};
  for (size_t i = 0; i < list.count; ++i) {
    const Tensor& one = list.tensors[i];
    add_row(rows, table, {one.values, nullptr, one.count, 0, one.dtype, one.dtype});
  }
  return rows;
}

std::vector<TensorRow> rows_of(const CastList& list, TensorTable* table) {
  std::vector<TensorRow> rows;
  *table = {};
  for (size_t i = 0; i < list.count; ++i) {
    const CastTensor& one = list.tensors[i];
    add_row(rows, table, {one.target, one.source, one.count, 0, one.to, one.from});
  }
  return rows;
}

}  // namespace pycoll::cuda
