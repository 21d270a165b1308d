// What a rank is in, in one word: peers' kernels compare it with what they are in (Agreement in
// kernels/cuda/kernels.h), and whoever is to say what differs reads it.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/operation.h"
#include "transport/call.h"

namespace pycoll::cuda {

// What kernels compare: collective, type, operation, root and length; of blocks that differ in
// length, which each rank knows, a hash. Of codes: the collective that carries them, and type,
// operation, root, codec and hashed lengths of the call that they stand for. Beside it the number
// of the call, which says how far a rank has come, and is not compared: graphs are replayed. Never
// 0.
uint64_t call_word(const CallRequest& request, uint64_t sequence);
// A message, or a part of an all_to_all between two ranks, of so many bytes; `over`: of codes.
uint64_t letter_word(Collective collective, uint64_t bytes, uint64_t sequence,
                     const OverCodec& over = {});

// Not a Collective: messages.
constexpr Collective kMessages = Collective::kCount;

// `sequence`: of a call nearby, since the word has only the last digits.
CallHeader header_of(uint64_t word, uint64_t sequence);

// How rank `peer` differs from this one, and in what: the words of both.
std::string describe_difference(int rank, uint64_t mine, int peer, uint64_t theirs,
                                uint64_t sequence);
// "all_reduce #3 (sum, 4 x float32)", "messages".
std::string describe_call(uint64_t word, uint64_t sequence);

}  // namespace pycoll::cuda
