#include "runtime/compressed_call.h"

#include <algorithm>

#include "core/error.h"
#include "runtime/codec_layout.h"

namespace pycoll {

CompressedCall::CompressedCall(CodecRequest request, int rank, std::shared_ptr<CallHome> home)
    : CompositeCall(std::move(static_cast<RequestBase&>(request)), rank, std::move(home)),
      request_(std::move(request)) {}

void CompressedCall::start(uint32_t number, Communicator& group) {
  if (!request_.step) request_.step = number;
  request_.over = over_of(request_);
  announced_ = group.announce_elsewhere(request_);
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
