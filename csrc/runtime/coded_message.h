// A message between two ranks whose values travel as codes.
#pragma once

#include "kernels/codec.h"
#include "runtime/operation.h"

namespace pycoll {

// How the values of a message are encoded; the key is of no meaning to who receives.
struct MessageCoding {
  Codec codec;
  RandomKey key;
};

// Says that the message is a code of its values: what its ranks compare. `code`: the memory.
void make_code(MessageRequest& request, const Codec& codec, std::byte* code);

// Of a message of values that can_encode(): one of their codes. A send is encoded here, and needs
// its values no longer; a receive decodes before its own `finalize`, and writes nothing when the
// message is not what it expects.
MessageRequest over_codes(MessageRequest request, const MessageCoding& coding);

}  // namespace pycoll
