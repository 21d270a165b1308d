#include "runtime/device/fused.h"

#include <vector>

#include "core/error.h"
#include "kernels/cuda/fused.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::cuda {
namespace {

cudaStream_t stream_of(const FusedPlace& place) {
  return static_cast<cudaStream_t>(place.stream);
}

void check_aligned(const void* values, DType dtype) {
  if (reinterpret_cast<uintptr_t>(values) % size_of(dtype) == 0) return;
  fail(ErrorKind::invalid_argument, "a tensor at ", values, " on a GPU is not aligned to its ",
       name_of(dtype), " elements: make a copy that is");
}

// Copies from ordinary memory read it before they return, so rows need not live longer. A graph
// would read them when it is launched.
void check_no_capture(const FusedPlace& place) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  require(cudaStreamIsCapturing(stream_of(place), &status), "cudaStreamIsCapturing");
  if (status == cudaStreamCaptureStatusNone) return;
  fail(ErrorKind::not_implemented,
       "a CUDA graph is being captured: kernels on lists of tensors cannot be part of one");
}

// The table of a list, in the first part of the room.
template <class List>
TensorTable tabled(const List& list, const FusedPlace& place) {
  static_assert(fused_room(1, 0) >= sizeof(TensorRow));
  check_no_capture(place);
  TensorTable table;
  const std::vector<TensorRow> rows = rows_of(list, &table);
  for (const TensorRow& row : rows) {
    check_aligned(row.values, row.dtype);
    if (row.source != nullptr) check_aligned(row.source, row.from);
  }
  if (rows.empty()) return table;
  require(cudaMemcpyAsync(place.room, rows.data(), rows.size() * sizeof(TensorRow),
                          cudaMemcpyHostToDevice, stream_of(place)),
          "cudaMemcpyAsync");
  table.rows = static_cast<const TensorRow*>(place.room);
  return table;
}

// In the rest of the room.
double* chunk_sums_of(const TensorTable& table, const FusedPlace& place) {
  return reinterpret_cast<double*>(static_cast<std::byte*>(place.room) +
                                   fused_room(table.tensors, 0));
}

Factor factor_of(const DeviceFactor& factor) {
  return {factor.value, factor.address};
}

}  // namespace

void cast(const CastList& list, float scale, const FusedPlace& place) {
  const DeviceGuard guard(place.device);
  const CastListCall call{tabled(list, place), scale, place.found_inf};
  require(cast_list(call, stream_of(place)), "launch of a cast");
}

void unscale(const TensorList& list, const DeviceFactor& factor, double* sum_of_squares,
             const FusedPlace& place) {
  const DeviceGuard guard(place.device);
  const TensorTable table = tabled(list, place);
  const UnscaleListCall call{table, factor_of(factor), chunk_sums_of(table, place), sum_of_squares,
                             place.found_inf};
  require(unscale_list(call, stream_of(place)), "launch of an unscaling");
}

void multiply(const TensorList& list, const DeviceFactor& factor, const FusedPlace& place) {
  const DeviceGuard guard(place.device);
  require(multiply_list({tabled(list, place), factor_of(factor)}, stream_of(place)),
          "launch of a multiplication");
}

void clip(const TensorList& list, const double* sum_of_squares, double max_norm,
          const FusedPlace& place) {
  const DeviceGuard guard(place.device);
  require(clip_list({tabled(list, place), sum_of_squares, max_norm}, stream_of(place)),
          "launch of a clipping");
}

}  // namespace pycoll::cuda
