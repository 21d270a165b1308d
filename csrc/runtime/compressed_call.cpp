#include "runtime/compressed_call.h"

#include <algorithm>

#include "core/error.h"

namespace pycoll {

std::vector<Touched> CodecRequest::touched() const {
  return {{input, output, size_of(dtype)},
          {{}, residual, sizeof(float)},
          {{}, sum_residual, sizeof(float)}};
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

uint64_t CompressedCall::whole_units(uint64_t count) const {
  const uint64_t unit = std::max<uint64_t>(request_.codec.block, 64);
  return (count + unit - 1) / unit * unit;
}

Range CompressedCall::share_of(uint64_t count, int ranks, int rank) const {
  const auto of = static_cast<uint64_t>(ranks);
  const uint64_t length = whole_units((count + of - 1) / of);
  const uint64_t begin = std::min(static_cast<uint64_t>(rank) * length, count);
  return {begin, std::min(length, count - begin)};
}

std::string CompressedCall::describe() const {
  const uint64_t count = std::max(request_.input.count(), request_.output.count());
  return concat(name_of(request_.collective), " over ", name_of(request_.codec.kind), " codes (",
                count, " x ", name_of(request_.dtype), ")");
}

}  // namespace pycoll
