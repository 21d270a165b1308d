#include "runtime/device/call_word.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/codec.h"
#include "kernels/cuda/kernels.h"

namespace pycoll::cuda {
namespace {

// From the lowest bit on. `present` makes a word that is not 0.
struct Field {
  int shift;
  int bits;
  constexpr uint64_t mask() const { return (uint64_t{1} << bits) - 1; }
  constexpr uint64_t in(uint64_t value) const { return (value & mask()) << shift; }
  constexpr uint64_t of(uint64_t word) const { return word >> shift & mask(); }
};
constexpr Field kCount{0, 35};
constexpr Field kCodes{35, 1};
constexpr Field kUneven{36, 1};
constexpr Field kCollective{37, 4};
constexpr Field kDType{41, 5};
constexpr Field kReduceOp{46, 4};
constexpr Field kRoot{50, 4};
constexpr Field kSequence{54, 9};
constexpr Field kPresent{63, 1};
static_assert(kComparedBits == ~kSequence.in(kSequence.mask()));
static_assert(static_cast<uint64_t>(kMessages) <= kCollective.mask());
static_assert(static_cast<uint64_t>(DType::kCount) <= kDType.mask());
static_assert(static_cast<uint64_t>(ReduceOp::kCount) <= kReduceOp.mask());
static_assert(kMaxRanks <= 16);
// Of codes, in the place of the count.
constexpr Field kHash{0, 24};
constexpr Field kCodec{24, 7};
constexpr Field kCall{31, 4};
static_assert(kCall.shift + kCall.bits == kCodes.shift);
static_assert(static_cast<int>(CodecKind::kCount) * 8 < 128);  // wire_tag()

bool are_equal(const VectorView& view) {
  const auto differs = [&](const Block& block) { return block.count != view.blocks[0].count; };
  return std::none_of(view.blocks.begin(), view.blocks.end(), differs);
}

uint64_t hash_of(const VectorView& view) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a, by words
  for (const Block& block : view.blocks) hash = (hash ^ block.count) * 1099511628211u;
  return hash ^ hash >> 36;
}

// `lengths`: of codes, all that both sides know.
uint64_t word_of_codes(Collective collective, uint64_t lengths, const OverCodec& over,
                       uint64_t sequence) {
  const auto call = static_cast<uint32_t>(over.call);  // pack_call()
  const uint64_t hash = (lengths ^ over.layout) * 0x9e3779b97f4a7c15u;
  return kPresent.in(1) | kSequence.in(sequence) | kRoot.in(call >> 24) |
         kReduceOp.in(call >> 16 & 0xff) | kDType.in(call >> 8 & 0xff) |
         kCollective.in(static_cast<uint64_t>(collective)) | kCodes.in(1) | kCall.in(call & 0xff) |
         kCodec.in(over.codec) | kHash.in(hash >> 40);
}

}  // namespace

uint64_t call_word(const CallRequest& request, uint64_t sequence) {
  const CollectiveTraits& traits = traits_of(request.collective);
  const bool by_input = traits.output_at_root || request.collective == Collective::all_gather;
  const VectorView& mine = by_input ? request.input : request.output;
  const VectorView& all = by_input ? request.output : request.input;
  if (request.over.codec != 0) {
    const uint64_t lengths = traits.lengths == Lengths::known ? hash_of(all) : mine.count();
    return word_of_codes(request.collective, lengths, request.over, sequence);
  }
  const bool uneven = traits.lengths == Lengths::known && !are_equal(all);
  return kPresent.in(1) | kSequence.in(sequence) | kRoot.in(static_cast<uint64_t>(request.root)) |
         kReduceOp.in(static_cast<uint64_t>(request.reduce_op)) |
         kDType.in(static_cast<uint64_t>(request.dtype)) |
         kCollective.in(static_cast<uint64_t>(request.collective)) | kUneven.in(uneven ? 1 : 0) |
         kCount.in(uneven ? hash_of(all) : mine.count());
}

uint64_t letter_word(Collective collective, uint64_t bytes, uint64_t sequence,
                     const OverCodec& over) {
  if (over.codec != 0) return word_of_codes(collective, bytes, over, sequence);
  return kPresent.in(1) | kSequence.in(sequence) |
         kCollective.in(static_cast<uint64_t>(collective)) |
         kDType.in(static_cast<uint64_t>(DType::uint8)) | kCount.in(bytes);
}

CallHeader header_of(uint64_t word, uint64_t sequence) {
  CallHeader header;
  // The nearest number with these digits.
  constexpr uint64_t kHalf = (kSequence.mask() + 1) / 2;
  const uint64_t ahead = (kSequence.of(word) - sequence + kHalf) & kSequence.mask();
  header.sequence = sequence + ahead - kHalf;
  header.collective = static_cast<Collective>(kCollective.of(word));
  if (kCodes.of(word) != 0) {
    header.codec = static_cast<uint8_t>(kCodec.of(word));
    header.root =
        pack_call(static_cast<Collective>(kCall.of(word)), static_cast<DType>(kDType.of(word)),
                  static_cast<ReduceOp>(kReduceOp.of(word)), static_cast<int>(kRoot.of(word)));
    header.algorithm = static_cast<uint32_t>(kHash.of(word));
    return header;
  }
  header.count = kUneven.of(word) != 0 ? 0 : kCount.of(word);
  header.layout = kUneven.of(word) != 0 ? 1 : 0;
  header.dtype = static_cast<DType>(kDType.of(word));
  header.reduce_op = static_cast<ReduceOp>(kReduceOp.of(word));
  header.root = static_cast<int32_t>(kRoot.of(word));
  return header;
}

std::string describe_call(uint64_t word, uint64_t sequence) {
  const CallHeader header = header_of(word, sequence);
  if (header.collective == kMessages) return "messages";
  // Each pair's lengths are its own, and the word is that of no message.
  const bool by_pairs = header.codec == 0 && header.collective == Collective::all_to_all;
  return by_pairs ? concat(name_of(header.collective), " #", header.sequence) : to_string(header);
}

std::string describe_difference(int rank, uint64_t mine, int peer, uint64_t theirs,
                                uint64_t sequence) {
  const CallHeader here = header_of(mine, sequence), there = header_of(theirs, sequence);
  if (here.codec != 0 || there.codec != 0) return describe_mismatch(rank, here, peer, there);
  const bool uneven = here.layout != 0 || there.layout != 0;
  if (uneven && here.collective == there.collective && here.dtype == there.dtype &&
      here.reduce_op == there.reduce_op && here.root == there.root) {
    return concat("the blocks' lengths differ: rank ", rank, " called ", name_of(here.collective),
                  " #", here.sequence, " with other lengths than rank ", peer,
                  ". Every rank must give the same lengths for all ranks");
  }
  const auto is_letter = [](const CallHeader& call) {
    return call.collective == kMessages || call.collective == Collective::all_to_all;
  };
  if (!is_letter(here) || !is_letter(there)) return describe_mismatch(rank, here, peer, there);
  const auto kind = [](const CallHeader& call) {
    return call.collective == kMessages ? "a message" : "an all_to_all";
  };
  return concat("sizes differ: rank ", rank, " expects ", here.count, " bytes of ", kind(here),
                " from rank ", peer, ", which sends ", there.count, " bytes of ", kind(there));
}

}  // namespace pycoll::cuda
