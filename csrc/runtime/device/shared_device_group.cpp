#include "runtime/device/shared_device_group.h"

#include <algorithm>

#include "core/error.h"
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
// Below, or with so few ranks, each rank sums all for itself: that saves it the copy out.
constexpr uint64_t kPartsFrom = 128 << 10;
constexpr int kFewRanks = 3;

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
      staging_at_(kWordRow * static_cast<size_t>(Word::kCount)),
      ones_(staging_at_) {
  std::fill_n(reinterpret_cast<uint32_t*>(ones_.data()), ones_.size() / sizeof(uint32_t), 1u);
  const size_t mail = mailbox_bytes_ * static_cast<size_t>(world_size());
  make_regions(driver_, staging_at_ + staging_bytes_ + mail);
  meeting_of(control_pointer()).together("making its mailboxes", [&] {
    // All are empty.
    std::vector<WordOperation> operations;
    for (int peer = 0; peer < world_size(); ++peer) {
      operations.push_back({false, word_of(rank(), Word::empty, peer), 1});
    }
    driver_.enqueue(operations, rescue_.get());
    require(cudaStreamSynchronize(rescue_.get()), "cudaStreamSynchronize");
  });
}

uint32_t* SharedDeviceGroup::word_of(int holder, Word row, int peer) const {
  std::byte* words = payload_of(holder) + kWordRow * static_cast<size_t>(row);
  return reinterpret_cast<uint32_t*>(words) + peer;
}

std::byte* SharedDeviceGroup::mailbox_of(int from, int to) const {
  return staging_of(from) + staging_bytes_ + mailbox_bytes_ * static_cast<size_t>(to);
}

void SharedDeviceGroup::meet(Word row, cudaStream_t stream) const {
  std::vector<WordOperation> operations;
  const auto for_peers = [&](const auto& add) {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank()) add(peer);
    }
  };
  for_peers([&](int peer) { operations.push_back({false, word_of(peer, row, rank()), 1}); });
  for_peers([&](int peer) {
    operations.push_back({true, word_of(rank(), row, peer), 1});
    operations.push_back({false, word_of(rank(), row, peer), 0});
  });
  driver_.enqueue(operations, stream);
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
  if (request.collective == Collective::barrier) {
    meet(Word::ready, stream);
    meet(Word::done, stream);
    return;
  }
  for (Round round = first_round(request); round.begin < round.longest; round.begin += round.slot) {
    run_round(request, round, stream);
  }
}

void SharedDeviceGroup::run_round(const CallRequest& request, const Round& round,
                                  cudaStream_t stream) const {
  copy_in(request, round, stream);
  meet(Word::ready, stream);
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

// The same on every rank: it goes by what all know.
bool SharedDeviceGroup::sums_by_parts(const CallRequest& request, const Round& round) const {
  return request.collective == Collective::all_reduce && world_size() > kFewRanks &&
         round.longest * round.element >= kPartsFrom;
}

void SharedDeviceGroup::reduce(const CallRequest& request, const Round& round,
                               cudaStream_t stream) const {
  if (request.output.blocks.empty()) return;  // of a reduce, at all but the root
  const Block& output = request.output.blocks[0];
  const uint64_t length = round.length_of(output);
  ReduceManyCall call;
  call.arithmetic = {request.dtype, request.reduce_op, world_size()};
  call.sources = world_size();
  call.targets = 1;
  call.output[0] = round.part_of(output);
  call.end = length;
  const auto slot = round.slots == 1 ? 0 : static_cast<uint64_t>(rank());
  for (int peer = 0; peer < world_size(); ++peer) {
    call.input[peer] = staging_of(peer) + round.slot_offset(slot);
  }
  if (sums_by_parts(request, round)) {
    const ChunkRange mine = chunk_range(length, world_size(), rank(), kCut);
    call.targets = world_size();
    call.begin = mine.begin;
    call.end = mine.end;
    for (int peer = 0; peer < world_size(); ++peer) call.output[peer] = staging_of(peer);
  }
  require(reduce_many(call, stream), "summing over ranks");
}

void SharedDeviceGroup::pull(const CallRequest& request, const Round& round,
                             cudaStream_t stream) const {
  const CollectiveTraits& traits = traits_of(request.collective);
  CopyList copies(stream);
  for (size_t i = 0; i < request.output.blocks.size(); ++i) {
    const Block& to = request.output.blocks[i];
    const int from = traits.output == Parts::world ? static_cast<int>(i) : request.root;
    const auto slot = round.slots == 1 ? 0 : static_cast<size_t>(rank());
    // This rank's own block is still where it came from.
    const std::byte* source = from == rank() ? round.part_of(request.input.blocks[slot])
                                             : staging_of(from) + round.slot_offset(slot);
    copies.add(source, round.part_of(to), round.length_of(to) * round.element);
  }
  copies.launch();
}

void SharedDeviceGroup::copy_out(const CallRequest& request, const Round& round,
                                 cudaStream_t stream) const {
  const Block& output = request.output.blocks[0];
  CopyList copies(stream);
  copies.add(staging_of(rank()), round.part_of(output), round.length_of(output) * round.element);
  copies.launch();
}

}  // namespace pycoll::cuda
