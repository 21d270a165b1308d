// Mailboxes of SharedDeviceGroup. A vector that is longer than a mailbox goes in parts; part k of
// each pair and direction belongs to round k. A rank puts its round into all mailboxes, then takes
// that of its peers, then goes on: a round waits for nothing but the round before it at the peers,
// and for what they sent in it.
#include <algorithm>

#include "runtime/device/copy_list.h"
#include "runtime/device/shared_device_group.h"

namespace pycoll::cuda {
namespace {

Block bytes_of(const Block& block, DType dtype) {
  return {block.data, block.count * size_of(dtype)};
}

}  // namespace

void SharedDeviceGroup::launch(const std::vector<MessageRequest>& batch, cudaStream_t stream) {
  const auto world = static_cast<size_t>(world_size());
  Mail mail{std::vector<std::vector<Block>>(world), std::vector<std::vector<Block>>(world)};
  for (const MessageRequest& message : batch) {
    auto& side = message.receives ? mail.from : mail.to;
    side[static_cast<size_t>(message.peer)].push_back(bytes_of(message.block, message.dtype));
  }
  exchange(mail, stream);
}

void SharedDeviceGroup::all_to_all(const CallRequest& request, cudaStream_t stream) const {
  const auto world = static_cast<size_t>(world_size());
  Mail mail{std::vector<std::vector<Block>>(world), std::vector<std::vector<Block>>(world)};
  CopyList own(stream);
  for (size_t peer = 0; peer < world; ++peer) {
    const Block input = bytes_of(request.input.blocks[peer], request.dtype);
    const Block output = bytes_of(request.output.blocks[peer], request.dtype);
    if (static_cast<int>(peer) == rank()) {
      own.add(input.data, output.data, input.count);
      continue;
    }
    mail.to[peer].push_back(input);
    mail.from[peer].push_back(output);
  }
  own.launch();
  exchange(mail, stream);
}

// Part `round` of what goes to (or comes from) each peer; none where there are no more.
std::vector<SharedDeviceGroup::Parcel> SharedDeviceGroup::parcels_of(
    const std::vector<std::vector<Block>>& mail, size_t round) const {
  std::vector<Parcel> parcels;
  for (size_t peer = 0; peer < mail.size(); ++peer) {
    size_t part = round;
    for (const Block& block : mail[peer]) {
      const size_t parts = (block.count + mailbox_bytes_ - 1) / mailbox_bytes_;
      if (part < parts) {
        const uint64_t begin = part * mailbox_bytes_;
        const uint64_t bytes = std::min<uint64_t>(mailbox_bytes_, block.count - begin);
        parcels.push_back({static_cast<int>(peer), {block.data + begin, bytes}});
        break;
      }
      part -= parts;
    }
  }
  return parcels;
}

void SharedDeviceGroup::exchange(const Mail& mail, cudaStream_t stream) const {
  for (size_t round = 0;; ++round) {
    const std::vector<Parcel> out = parcels_of(mail.to, round);
    const std::vector<Parcel> in = parcels_of(mail.from, round);
    if (out.empty() && in.empty()) return;
    post(out, stream);
    collect(in, stream);
  }
}

void SharedDeviceGroup::post(const std::vector<Parcel>& parcels, cudaStream_t stream) const {
  std::vector<WordOperation> before, after;
  CopyList copies(stream);
  for (const Parcel& parcel : parcels) {
    uint32_t* const empty = word_of(rank(), Word::empty, parcel.peer);
    before.push_back({true, empty, 1});
    before.push_back({false, empty, 0});
    copies.add(parcel.block.data, mailbox_of(rank(), parcel.peer), parcel.block.count);
    after.push_back({false, word_of(parcel.peer, Word::full, rank()), 1});
  }
  driver_.enqueue(before, stream);
  copies.launch();
  driver_.enqueue(after, stream);
}

void SharedDeviceGroup::collect(const std::vector<Parcel>& parcels, cudaStream_t stream) const {
  std::vector<WordOperation> before, after;
  CopyList copies(stream);
  for (const Parcel& parcel : parcels) {
    uint32_t* const full = word_of(rank(), Word::full, parcel.peer);
    before.push_back({true, full, 1});
    before.push_back({false, full, 0});
    copies.add(mailbox_of(parcel.peer, rank()), parcel.block.data, parcel.block.count);
    after.push_back({false, word_of(parcel.peer, Word::empty, rank()), 1});
  }
  driver_.enqueue(before, stream);
  copies.launch();
  driver_.enqueue(after, stream);
}

}  // namespace pycoll::cuda
