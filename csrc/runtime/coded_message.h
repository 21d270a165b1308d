// A message between two ranks whose values travel as codes.
#pragma once

#include "kernels/codec.h"
#include "runtime/operation.h"

namespace pycoll {

// Of a message of values that can_encode(): one of their codes. A send is encoded here, and needs
// its values no longer; a receive decodes before its own `finalize`, and writes nothing when the
// message is not what it expects. `key`: of the send.
MessageRequest over_codes(MessageRequest request, const Codec& codec, const RandomKey& key);

}  // namespace pycoll
