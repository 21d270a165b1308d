#include "runtime/compressed_call.h"

#include <algorithm>

#include "core/error.h"

namespace pycoll {

std::vector<Touched> CodecRequest::touched() const {
  return {{input, output, size_of(dtype)},
          {{}, residual, sizeof(float)},
          {{}, sum_residual, sizeof(float)}};
}

CodecRequest with_codec(CallRequest call, const CodecChoice& choice) {
  CodecRequest request;
  request.collective = call.collective;
  request.codec = choice.codec;
  request.dtype = call.dtype;
  request.reduce_op = call.reduce_op;
  request.root = call.root;
  request.input = std::move(call.input);
  request.output = std::move(call.output);
  request.seed = choice.seed;
  request.step = choice.step;
  request.residual = choice.residual;
  request.sum_residual = choice.sum_residual;
  static_cast<RequestBase&>(request) = std::move(call);
  return request;
}

CompressedCall::CompressedCall(CodecRequest request, int rank, std::shared_ptr<CallHome> home)
    : CompositeCall(std::move(static_cast<RequestBase&>(request)), rank, std::move(home)),
      request_(std::move(request)) {}

void CompressedCall::start(uint32_t number) {
  if (!request_.step) request_.step = number;
  CompositeCall::start();
}

bool CompressedCall::in_conflict(const Touched& touched) const {
  const auto mine = request_.touched();
  return std::ranges::any_of(mine,
                             [&](const Touched& one) { return pycoll::in_conflict(one, touched); });
}

std::string CompressedCall::describe() const {
  const uint64_t count = std::max(request_.input.count(), request_.output.count());
  return concat(name_of(request_.collective), " over ", name_of(request_.codec.kind), " codes (",
                count, " x ", name_of(request_.dtype), ")");
}

}  // namespace pycoll
