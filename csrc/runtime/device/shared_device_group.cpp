#include "runtime/device/shared_device_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "runtime/device/call_word.h"
#include "runtime/device/copy_list.h"

namespace pycoll::cuda {
namespace {

constexpr size_t kWordRow = 256;  // bytes
static_assert(kWordRow >= kMaxRanks * sizeof(uint32_t));
// As multiples of what the CPU path stages: 32 MiB and 1 MiB unless somebody chose otherwise.
constexpr size_t kStagingWindows = 64;
constexpr size_t kMailboxSlots = 8;
// Elements by which vectors are cut: parts keep the alignment of wholes.
constexpr uint64_t kCut = 64;
// Behind the rows of words: two places and what this rank is in; whether it has given up; letters.
constexpr size_t kMoreWords = 512;
constexpr size_t kGivenUpAt = 128;
constexpr size_t kLettersAt = 256;
static_assert(kMoreWords - kLettersAt >= kMaxRanks * sizeof(uint64_t));
// What is read for the text of an error comes at once, if it comes.
constexpr Nanoseconds kReadPatience = std::chrono::milliseconds(200);

constexpr size_t round_up(size_t x, size_t to) {
  return (x + to - 1) / to * to;
}

bool sums(const CallRequest& request) {
  return reduces(request.collective);
}

uint64_t longest_block(const VectorView& view) {
  uint64_t most = 0;
  for (const Block& block : view.blocks) most = std::max(most, block.count);
  return most;
}

}  // namespace

// Elements [begin, begin + length) of every block that is longer than `begin`.
struct SharedDeviceGroup::Round {
  uint64_t element = 1;  // bytes
  uint64_t slots = 1;    // blocks that lie in a staging area together
  uint64_t slot = 0;     // elements of one
  uint64_t longest = 0;  // of all blocks of the call, the same on every rank
  uint64_t begin = 0;
  uint64_t word = 0;  // call_word()
  Placed placed;      // of this rank

  uint64_t slot_offset(uint64_t index) const { return index * slot * element; }
  uint64_t length_of(const Block& block) const {
    return begin >= block.count ? 0 : std::min(slot, block.count - begin);
  }
  std::byte* part_of(const Block& block) const { return block.data + begin * element; }
};

SharedDeviceGroup::SharedDeviceGroup(GroupSeed seed)
    : CudaGroup(std::move(seed)),
      staging_bytes_(control().config().window_bytes * kStagingWindows),
      mailbox_bytes_(round_up(control().config().slot_bytes * kMailboxSlots, kWordRow)),
      places_at_(kWordRow * static_cast<size_t>(Word::kCount) + kMoreWords),
      staging_at_(places_at_ + Places::bytes_for(world_size())),
      ones_(kWordRow * static_cast<size_t>(Word::kCount)),
      differs_(kMaxRanks * sizeof(uint64_t)),
      calls_(kMaxRanks * sizeof(uint64_t)),
      rescue_(Stream::ahead_of_others()) {
  std::fill_n(reinterpret_cast<uint32_t*>(ones_.data()), ones_.size() / sizeof(uint32_t), 1u);
  std::memset(differs_.data(), 0, differs_.size());
}

void SharedDeviceGroup::connect() {
  const size_t mail = mailbox_bytes_ * static_cast<size_t>(world_size());
  make_regions(driver_, staging_at_ + staging_bytes_ + mail);
  meeting_of(control_pointer(), device()).together("making its mailboxes", [&] {
    // All are empty.
    std::vector<WordOperation> operations;
    for (int peer = 0; peer < world_size(); ++peer) {
      operations.push_back(write(word_of(rank(), Word::empty, peer), 1));
    }
    driver_.enqueue(operations, rescue_.get());
    require(cudaStreamSynchronize(rescue_.get()), "cudaStreamSynchronize");
    places_ = std::make_unique<Places>(peers(), driver_,
                                       [this](int peer) { return payload_of(peer) + places_at_; });
  });
}

uint32_t* SharedDeviceGroup::word_of(int holder, Word row, int peer) const {
  std::byte* words = payload_of(holder) + kWordRow * static_cast<size_t>(row);
  return reinterpret_cast<uint32_t*>(words) + peer;
}

uint64_t* SharedDeviceGroup::place_of(int holder, Side side) const {
  std::byte* words = payload_of(holder) + places_at_ - kMoreWords;
  return reinterpret_cast<uint64_t*>(words) + static_cast<size_t>(side);
}
uint32_t* SharedDeviceGroup::given_up() const {
  return reinterpret_cast<uint32_t*>(payload_of(rank()) + places_at_ - kMoreWords + kGivenUpAt);
}
uint64_t* SharedDeviceGroup::letter_of(int from, int to) const {
  std::byte* letters = payload_of(from) + places_at_ - kMoreWords + kLettersAt;
  return reinterpret_cast<uint64_t*>(letters) + to;
}

std::byte* SharedDeviceGroup::mailbox_of(int from, int to) const {
  return staging_of(from) + staging_bytes_ + mailbox_bytes_ * static_cast<size_t>(to);
}

void SharedDeviceGroup::meet(Word row, cudaStream_t stream,
                             std::vector<WordOperation> first) const {
  std::vector<WordOperation> operations = std::move(first);
  const auto for_peers = [&](const auto& add) {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank()) add(peer);
    }
  };
  for_peers([&](int peer) { operations.push_back(write(word_of(peer, row, rank()), 1)); });
  for_peers([&](int peer) {
    operations.push_back(wait_for(word_of(rank(), row, peer), 1));
    operations.push_back(write(word_of(rank(), row, peer), 0));
  });
  driver_.enqueue(operations, stream);
}

Agreement SharedDeviceGroup::agreement_on(uint64_t word) const {
  Agreement agreement;
  agreement.self = rank();
  agreement.differs = reinterpret_cast<uint64_t*>(differs_.data());
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer != rank()) agreement.theirs[peer] = place_of(peer, Side::call);
    agreement.expected[peer] = word;
  }
  return agreement;
}

std::optional<Error> SharedDeviceGroup::reported() {
  auto* words = reinterpret_cast<uint64_t*>(differs_.data());
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    // Acquire: pairs with the kernel's release, and this rank's word was stored before.
    const uint64_t theirs = std::atomic_ref(words[peer]).load(std::memory_order_acquire);
    if (theirs == 0) continue;
    const uint64_t mine = std::atomic_ref(words[rank()]).load(std::memory_order_relaxed);
    return Error(ErrorKind::mismatch, describe_difference(rank(), mine, peer, theirs, sequence()));
  }
  return std::nullopt;
}

// From what ranks have written before they met.
std::string SharedDeviceGroup::why_late() const {
  auto* words = reinterpret_cast<uint64_t*>(calls_.data());
  for (int peer = 0; peer < world_size(); ++peer) {
    cudaMemcpyAsync(words + peer, place_of(peer, Side::call), sizeof(*words), cudaMemcpyDefault,
                    rescue_.get());
  }
  const Deadline deadline = Deadline::after(kReadPatience);
  while (cudaStreamQuery(rescue_.get()) == cudaErrorNotReady && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (cudaStreamQuery(rescue_.get()) != cudaSuccess) return "";
  const uint64_t mine = words[rank()], number = sequence();
  if (mine == 0) return "";
  std::string text = concat("in ", describe_call(mine, number)), others;
  // Only the two ranks of a message know of it.
  if (header_of(mine, number).collective == kMessages) return text;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (words[peer] == mine) continue;
    others += concat(others.empty() ? ", waiting for rank " : "; rank ", peer, ", which ");
    others += words[peer] == 0 ? "has made no call there"
                               : concat("was last in ", describe_call(words[peer], number));
  }
  return text + (others.empty() ? ", as its peers are" : others);
}

void SharedDeviceGroup::disarm() {
  cudaMemcpyAsync(given_up(), ones_.data(), sizeof(uint32_t), cudaMemcpyDefault, rescue_.get());
  cudaStreamSynchronize(rescue_.get());
}

// Words that this rank's streams wait for become 1 until nothing waits any more.
void SharedDeviceGroup::release_waits() {
  cudaMemcpyAsync(payload_of(rank()), ones_.data(), ones_.size(), cudaMemcpyDefault, rescue_.get());
  cudaStreamSynchronize(rescue_.get());
}

SharedDeviceGroup::Round SharedDeviceGroup::first_round(const CallRequest& request) const {
  Round round;
  round.element = size_of(request.dtype);
  const bool by_rank = traits_of(request.collective).input == Parts::world;
  round.slots = by_rank ? static_cast<uint64_t>(world_size()) : 1;
  round.slot = staging_bytes_ / round.slots / round.element / kCut * kCut;
  round.longest = std::max(longest_block(request.input), longest_block(request.output));
  return round;
}

void SharedDeviceGroup::launch(const CallRequest& request, cudaStream_t stream) {
  if (request.collective == Collective::all_to_all) return all_to_all(request, stream);
  const uint64_t word = call_word(request, sequence());
  if (request.collective == Collective::barrier) {
    meet(Word::ready, stream, {write(place_of(rank(), Side::call), word)});
    meet(Word::done, stream);
    return;
  }
  Round round = first_round(request);
  round.word = word;
  round.placed = place(request, round);
  for (; round.begin < round.longest; round.begin += round.slot) run_round(request, round, stream);
}

// The same on every rank.
bool SharedDeviceGroup::may_be_placed(const Round& round) const {
  return world_size() > 1 && round.longest * round.element >= control().config().slot_bytes;
}

uint64_t SharedDeviceGroup::find_place(const VectorView& view, uint64_t element, bool idle) {
  if (view.blocks.empty()) return 0;
  // As one vector: peers know the lengths, not the places of blocks.
  const std::byte* end = view.blocks[0].data;
  for (const Block& block : view.blocks) {
    if (block.data != end) return 0;
    end += block.count * element;
  }
  const auto bytes = static_cast<uint64_t>(end - view.blocks[0].data);
  return places_->word_for(view.blocks[0].data, bytes, is_captured(), idle);
}

SharedDeviceGroup::Placed SharedDeviceGroup::place(const CallRequest& request, const Round& round) {
  Placed placed;
  if (!may_be_placed(round)) return placed;
  if (!is_captured()) places_->progress();
  const bool idle = !is_captured() && !under_way();
  if (request.reduce_op != ReduceOp::premul_sum) {
    placed.input = find_place(request.input, round.element, idle);
  }
  if (sums_by_parts(request, round)) {
    placed.output = find_place(request.output, round.element, idle);
  }
  return placed;
}

// Elements `before` lie in front of the block in the peer's vector; `slot` is its number.
PeerPlace SharedDeviceGroup::peer_place(int peer, Side side, const Round& round, uint64_t slot,
                                        uint64_t before) const {
  PeerPlace place;
  place.staged = staging_of(peer) + round.slot_offset(slot);
  if (peer == rank() || !may_be_placed(round)) return place;
  place.word = place_of(peer, side);
  place.table = places_->table_of(peer);
  place.offset = (before + round.begin) * round.element;
  return place;
}

// This rank's block, where it is read in this round.
std::byte* SharedDeviceGroup::own_input(const CallRequest& request, const Round& round,
                                        size_t slot) const {
  if (round.placed.input != 0) return round.part_of(request.input.blocks[slot]);
  return staging_of(rank()) + round.slot_offset(slot);
}

void SharedDeviceGroup::run_round(const CallRequest& request, const Round& round,
                                  cudaStream_t stream) const {
  copy_in(request, round, stream);
  std::vector<WordOperation> words;  // read by peers after they have met this rank
  if (round.begin == 0) {
    words.push_back(write(place_of(rank(), Side::call), round.word));
    if (may_be_placed(round)) {
      words.push_back(write(place_of(rank(), Side::input), round.placed.input));
      words.push_back(write(place_of(rank(), Side::output), round.placed.output));
    }
  }
  meet(Word::ready, stream, std::move(words));
  if (sums(request)) {
    reduce(request, round, stream);
  } else {
    pull(request, round, stream);
  }
  meet(Word::done, stream);
  if (sums_by_parts(request, round)) copy_out(request, round, stream);
}

void SharedDeviceGroup::copy_in(const CallRequest& request, const Round& round,
                                cudaStream_t stream) const {
  if (round.placed.input != 0) return;
  CopyList copies(stream);
  for (size_t i = 0; i < request.input.blocks.size(); ++i) {
    const Block& block = request.input.blocks[i];
    std::byte* to = staging_of(rank()) + round.slot_offset(i);
    if (request.reduce_op == ReduceOp::premul_sum) {
      require(scale({.dtype = request.dtype,
                     .input = round.part_of(block),
                     .output = to,
                     .count = round.length_of(block),
                     .factor = request.premul_factor},
                    stream),
              "scaling the input of premul_sum");
    } else {
      copies.add(round.part_of(block), to, round.length_of(block) * round.element);
    }
  }
  copies.launch();
}

// The same on every rank. Else each sums all for itself, which saves the copy out.
bool SharedDeviceGroup::sums_by_parts(const CallRequest& request, const Round& round) const {
  return request.collective == Collective::all_reduce && may_be_placed(round);
}

void SharedDeviceGroup::reduce(const CallRequest& request, const Round& round,
                               cudaStream_t stream) const {
  // Of a reduce, at all but the root: only that all ranks mean the same.
  if (request.output.blocks.empty()) return pull(request, round, stream);
  const Block& output = request.output.blocks[0];
  ReducePlacesCall call;
  call.given_up = given_up();
  call.agreement = agreement_on(round.word);
  call.arithmetic = {request.dtype, request.reduce_op, world_size()};
  call.sources = world_size();
  call.targets = 1;
  call.output[0].staged = round.part_of(output);
  call.end = round.length_of(output);
  const auto slot = round.slots == 1 ? 0 : static_cast<size_t>(rank());
  uint64_t before = 0;
  for (size_t i = 0; i < slot; ++i) before += request.input.blocks[i].count;
  for (int peer = 0; peer < world_size(); ++peer) {
    call.input[peer] = peer_place(peer, Side::input, round, slot, before);
  }
  call.input[rank()].staged = own_input(request, round, slot);
  if (sums_by_parts(request, round)) {
    const ChunkRange mine = chunk_range(call.end, world_size(), rank(), kCut);
    call.targets = world_size();
    call.begin = mine.begin;
    call.end = mine.end;
    for (int peer = 0; peer < world_size(); ++peer) {
      call.output[peer] = peer_place(peer, Side::output, round, 0, 0);
    }
    if (round.placed.output != 0) call.output[rank()].staged = round.part_of(output);
  }
  require(reduce_places(call, stream), "summing over ranks");
}

void SharedDeviceGroup::pull(const CallRequest& request, const Round& round,
                             cudaStream_t stream) const {
  const CollectiveTraits& traits = traits_of(request.collective);
  const auto slot = round.slots == 1 ? 0 : static_cast<size_t>(rank());
  CopyPlacesCall call;
  call.given_up = given_up();
  call.agreement = agreement_on(round.word);
  for (size_t i = 0; i < request.output.blocks.size(); ++i) {
    const Block& to = request.output.blocks[i];
    const int from = traits.output == Parts::world ? static_cast<int>(i) : request.root;
    // Blocks of a scatter are alike.
    PeerPlace source = peer_place(from, Side::input, round, slot, slot * to.count);
    // This rank's own block is still where it came from.
    if (from == rank()) source.staged = round.part_of(request.input.blocks[slot]);
    call.src[call.copies] = source;
    call.dst[call.copies] = round.part_of(to);
    call.bytes[call.copies++] = round.length_of(to) * round.element;
  }
  require(copy_places(call, stream), "copying between ranks");
}

void SharedDeviceGroup::copy_out(const CallRequest& request, const Round& round,
                                 cudaStream_t stream) const {
  if (round.placed.output != 0) return;
  const Block& output = request.output.blocks[0];
  CopyList copies(stream);
  copies.add(staging_of(rank()), round.part_of(output), round.length_of(output) * round.element);
  copies.launch();
}

}  // namespace pycoll::cuda
