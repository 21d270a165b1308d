#include "runtime/codec_request.h"

#include <algorithm>

#include "core/error.h"
#include "runtime/communicator.h"

namespace pycoll {
namespace {

constexpr Collective kServed[] = {Collective::all_reduce, Collective::reduce_scatter,
                                  Collective::all_gather, Collective::broadcast,
                                  Collective::all_to_all};

// Of one length with the vector, and no memory of the call's.
void check_residual(const char* name, const CodecRequest& request, const VectorView& residual,
                    const VectorView& vector) {
  if (residual.blocks.empty()) return;
  const auto same = [](const Block& a, const Block& b) { return a.count == b.count; };
  if (!std::ranges::equal(residual.blocks, vector.blocks, same)) {
    fail(ErrorKind::invalid_argument, name_of(request.collective), ": ", name, " has ",
         residual.count(), " elements, the vector ", vector.count());
  }
  const Touched written{{}, residual, sizeof(float)};
  if (in_conflict(written, {request.input, request.output, size_of(request.dtype)})) {
    fail(ErrorKind::invalid_argument, name_of(request.collective), ": ", name,
         " shares memory with the vector (overlapping)");
  }
}

void check_residuals(const CodecRequest& request) {
  check_residual("residual", request, request.residual, request.input);
  check_residual("sum_residual", request, request.sum_residual, request.output);
  const bool sums_whole = request.collective == Collective::all_reduce;
  if (!request.sum_residual.blocks.empty() && !sums_whole) {
    fail(ErrorKind::invalid_argument, name_of(request.collective),
         " encodes no sum: sum_residual is for all_reduce");
  }
  if (in_conflict({{}, request.residual, sizeof(float)},
                  {{}, request.sum_residual, sizeof(float)})) {
    fail(ErrorKind::invalid_argument, name_of(request.collective),
         ": residual and sum_residual share memory (overlapping)");
  }
}

}  // namespace

std::vector<Touched> CodecRequest::touched() const {
  return {{input, output, size_of(dtype)},
          {{}, residual, sizeof(float)},
          {{}, sum_residual, sizeof(float)}};
}

bool can_compress(int world_size, Collective collective, DType dtype, ReduceOp op) {
  const bool served = std::ranges::find(kServed, collective) != std::end(kServed);
  const bool op_serves = op == ReduceOp::none || op == ReduceOp::sum || op == ReduceOp::avg;
  return world_size > 1 && served && can_encode(dtype) && op_serves;
}

void check_codec_request(const Communicator& group, const CodecRequest& request) {
  check_codec(request.codec);
  if (!can_compress(group.world_size(), request.collective, request.dtype, request.reduce_op)) {
    fail(ErrorKind::not_implemented, name_of(request.collective), " of ", name_of(request.dtype),
         " is not compressed");
  }
  group.check(request);
  check_residuals(request);
}

}  // namespace pycoll
