// What calls and messages have in common whatever holds their data, NumPy arrays or memory of a
// GPU: the words of a request. The blocks are the caller's to add.
#pragma once

#include <optional>

#include "parse.h"
#include "runtime/operation.h"

namespace pycoll {

// `Asked` has collective, dtype, op, factor, root, algorithm and timeout (none: the group's).
template <typename Asked>
CallRequest words_of_call(const Asked& asked) {
  CallRequest request;
  request.collective = parse_enum<Collective>(asked.collective, "collective");
  request.dtype = parse_enum<DType>(asked.dtype, "dtype");
  request.reduce_op = parse_enum<ReduceOp>(asked.op, "reduce operation");
  request.premul_factor = asked.factor;
  request.root = asked.root;
  request.algorithm = asked.algorithm;
  const std::optional<double> timeout = asked.timeout;
  if (timeout) request.timeout = from_seconds(*timeout);
  return request;
}

// `Asked` has receives, dtype, peer (none: a receive from any rank), tag and timeout.
template <typename Asked>
MessageRequest words_of_message(const Asked& asked) {
  MessageRequest request;
  request.receives = asked.receives;
  request.dtype = parse_enum<DType>(asked.dtype, "dtype");
  const std::optional<int> peer = asked.peer;
  request.peer = peer.value_or(kAnySource);
  request.tag = asked.tag;
  const std::optional<double> timeout = asked.timeout;
  if (timeout) request.timeout = from_seconds(*timeout);
  return request;
}

}  // namespace pycoll
