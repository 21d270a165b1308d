// Mailboxes of SharedDeviceGroup. A vector that is longer than a mailbox goes in parts; part k of
// each pair and direction belongs to round k. A rank puts its round into all mailboxes, then takes
// that of its peers, then goes on: a round waits for nothing but the round before it at the peers,
// and for what they sent in it.
#include <algorithm>

#include "runtime/device/call_word.h"
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
  const std::vector<std::vector<Block>> none(world);
  Mail mail{none, none, kMessages};
  for (const MessageRequest& message : batch) {
    auto& side = message.receives ? mail.from : mail.to;
    side[static_cast<size_t>(message.peer)].push_back(bytes_of(message.block, message.dtype));
  }
  exchange(mail, stream);
}

void SharedDeviceGroup::all_to_all(const CallRequest& request, cudaStream_t stream) const {
  const auto world = static_cast<size_t>(world_size());
  const std::vector<std::vector<Block>> none(world);
  Mail mail{none, none, Collective::all_to_all, request.over};
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

std::vector<SharedDeviceGroup::Parcel> SharedDeviceGroup::parcels_of(const Mail& mail, bool coming,
                                                                     size_t round) const {
  const std::vector<std::vector<Block>>& blocks = coming ? mail.from : mail.to;
  std::vector<Parcel> parcels;
  for (size_t peer = 0; peer < blocks.size(); ++peer) {
    size_t part = round;
    for (const Block& block : blocks[peer]) {
      const size_t parts = (block.count + mailbox_bytes_ - 1) / mailbox_bytes_;
      if (part < parts) {
        const uint64_t begin = part * mailbox_bytes_;
        const uint64_t bytes = std::min<uint64_t>(mailbox_bytes_, block.count - begin);
        const uint64_t letter = letter_word(mail.kind, block.count, sequence(), mail.over);
        parcels.push_back({static_cast<int>(peer), {block.data + begin, bytes}, letter});
        break;
      }
      part -= parts;
    }
  }
  return parcels;
}

void SharedDeviceGroup::exchange(const Mail& mail, cudaStream_t stream) const {
  const uint64_t call = letter_word(mail.kind, 0, sequence(), mail.over);
  driver_.enqueue({write(place_of(rank(), Side::call), call)}, stream);
  for (size_t round = 0;; ++round) {
    const std::vector<Parcel> out = parcels_of(mail, false, round);
    const std::vector<Parcel> in = parcels_of(mail, true, round);
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
    before.push_back(wait_for(empty, 1));
    before.push_back(write(empty, 0));
    copies.add(parcel.block.data, mailbox_of(rank(), parcel.peer), parcel.block.count);
    after.push_back(write(letter_of(rank(), parcel.peer), parcel.letter));
    after.push_back(write(word_of(parcel.peer, Word::full, rank()), 1));
  }
  driver_.enqueue(before, stream);
  copies.launch();
  driver_.enqueue(after, stream);
}

void SharedDeviceGroup::collect(const std::vector<Parcel>& parcels, cudaStream_t stream) const {
  std::vector<WordOperation> before, after;
  CopyPlacesCall call;  // at most one parcel a peer
  call.given_up = given_up();
  call.agreement.self = rank();
  call.agreement.differs = reinterpret_cast<uint64_t*>(differs_.data());
  for (const Parcel& parcel : parcels) {
    uint32_t* const full = word_of(rank(), Word::full, parcel.peer);
    before.push_back(wait_for(full, 1));
    before.push_back(write(full, 0));
    call.agreement.theirs[parcel.peer] = letter_of(parcel.peer, rank());
    call.agreement.expected[parcel.peer] = parcel.letter;
    call.src[call.copies].staged = mailbox_of(parcel.peer, rank());
    call.dst[call.copies] = parcel.block.data;
    call.bytes[call.copies++] = parcel.block.count;
    after.push_back(write(word_of(parcel.peer, Word::empty, rank()), 1));
  }
  driver_.enqueue(before, stream);
  require(copy_places(call, stream), "copying messages");
  driver_.enqueue(after, stream);
}

}  // namespace pycoll::cuda
