#include "transport/call.h"

#include "core/error.h"
#include "kernels/codec.h"

namespace pycoll {

uint32_t fingerprint(const CallHeader& call) {
  uint64_t hash = 0x9E3779B97F4A7C15ull;
  const auto mix = [&hash](uint64_t value) {
    hash ^= value;
    hash *= 0xBF58476D1CE4E5B9ull;
    hash ^= hash >> 29;
  };
  mix(call.sequence);
  mix(call.count);
  mix(static_cast<uint64_t>(call.collective) | static_cast<uint64_t>(call.dtype) << 8 |
      static_cast<uint64_t>(call.reduce_op) << 16 | static_cast<uint64_t>(call.codec) << 24 |
      static_cast<uint64_t>(static_cast<uint32_t>(call.root)) << 32);
  mix(call.algorithm | static_cast<uint64_t>(call.layout) << 32);
  const auto folded = static_cast<uint32_t>(hash ^ (hash >> 32));
  return folded == 0 ? 1 : folded;
}

int32_t pack_call(Collective collective, DType dtype, ReduceOp op, int root) {
  return static_cast<int32_t>(static_cast<uint32_t>(collective) |
                              static_cast<uint32_t>(dtype) << 8 | static_cast<uint32_t>(op) << 16 |
                              static_cast<uint32_t>(root) << 24);
}

namespace {

std::string describe_over_codes(const CallHeader& call) {
  const auto packed = static_cast<uint32_t>(call.root);
  const auto collective = static_cast<Collective>(packed & 0xff);
  const auto op = static_cast<ReduceOp>(packed >> 16 & 0xff);
  const bool itself = call.algorithm == 0;
  const bool has_count = itself && traits_of(collective).lengths != Lengths::pairwise;
  const std::string number = concat(" #", call.sequence);
  std::string text = concat(name_of(collective), itself ? number : "", " over codes (",
                            describe_wire_tag(call.codec), ", ");
  if (op != ReduceOp::none) text += concat(name_of(op), ", ");
  if (traits_of(collective).rooted) text += concat("root ", packed >> 24, ", ");
  if (has_count) text += concat(call.count, " x ");
  text += concat(name_of(static_cast<DType>(packed >> 8 & 0xff)), ")");
  return itself ? text : concat(text, ", as ", name_of(call.collective), number);
}

}  // namespace

std::string to_string(const CallHeader& call) {
  if (call.codec == kSplit) return concat("split #", call.sequence);
  if (call.codec != 0) return describe_over_codes(call);
  std::string text = concat(name_of(call.collective), " #", call.sequence);
  if (call.collective == Collective::barrier) return text;
  text += " (";
  if (call.reduce_op != ReduceOp::none) text += concat(name_of(call.reduce_op), ", ");
  if (traits_of(call.collective).rooted) text += concat("root ", call.root, ", ");
  // The lengths of all_to_all are each pair's own.
  if (traits_of(call.collective).lengths != Lengths::pairwise) text += concat(call.count, " x ");
  text += name_of(call.dtype);
  return text + (call.layout == 0 ? ")" : " in blocks of different lengths)");
}

std::string describe_mismatch(int rank, const CallHeader& mine, int peer,
                              const CallHeader& theirs) {
  std::string what;
  const char* advice = "";
  if ((mine.codec == 0) != (theirs.codec == 0) && mine.codec != kSplit && theirs.codec != kSplit) {
    what = "one call has a codec, the other has none";
    advice = " Every rank must give a call the same codec, or be in the same region.";
  } else if (mine.codec != 0 && theirs.codec != 0 && mine.codec != theirs.codec) {
    what = "codecs differ";
  } else if (mine.codec != 0 && theirs.codec != 0 && mine.root != theirs.root) {
    what = "calls over codes differ";
  } else if (mine.codec != 0 && theirs.codec != 0 && mine.algorithm != theirs.algorithm) {
    what = "sizes differ";
  } else if (mine.collective != theirs.collective) {
    what = "operations differ";
  } else if (mine.dtype != theirs.dtype) {
    what = "dtypes differ";
  } else if (mine.count != theirs.count) {
    what = "sizes differ";
  } else if (mine.reduce_op != theirs.reduce_op) {
    what = "reduce operations differ";
  } else if (mine.root != theirs.root) {
    what = "roots differ";
  } else if (mine.layout != theirs.layout) {
    what = "the blocks' lengths differ";
  } else {
    what = "algorithms differ (an algorithm= argument must be the same on every rank)";
  }
  return concat(what, ": rank ", rank, " called ", to_string(mine), ", rank ", peer, " called ",
                to_string(theirs),
                ". Every rank must call the same collectives in the same order with the same sizes "
                "and dtypes.",
                advice);
}

}  // namespace pycoll
