// Groups made of ranks of a group.
#include <algorithm>
#include <cstring>
#include <map>

#include "core/error.h"
#include "runtime/communicator.h"

namespace pycoll {
namespace {

using Bytes = std::vector<std::byte>;

// Everybody's bytes, of any length, by rank.
std::vector<Bytes> exchange(Communicator& group, Bytes mine, const Interrupt& interrupt) {
  const auto world = static_cast<size_t>(group.world_size());
  std::vector<uint64_t> lengths(world);
  uint64_t length = mine.size();
  CallRequest sizes;
  sizes.collective = Collective::all_gather;
  sizes.dtype = DType::uint64;
  sizes.input.blocks.push_back({reinterpret_cast<std::byte*>(&length), 1});
  for (uint64_t& one : lengths) {
    sizes.output.blocks.push_back({reinterpret_cast<std::byte*>(&one), 1});
  }
  group.run(std::move(sizes), interrupt);

  std::vector<Bytes> all;
  for (const uint64_t one : lengths) all.emplace_back(one);
  CallRequest contents;
  contents.collective = Collective::all_gather;
  contents.input.blocks.push_back({mine.data(), mine.size()});
  for (Bytes& one : all) contents.output.blocks.push_back({one.data(), one.size()});
  group.run(std::move(contents), interrupt);
  return all;
}

Bytes bytes_of(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

// Plays the store for ranks that have a group already. What each of them publishes first, all of
// them get, by that group. Nothing else is kept: a rank that gives up is missed by its peers in the
// new group, and seen to be gone.
class GroupStore final : public Store {
 public:
  GroupStore(Communicator& group, std::vector<int> members, const Interrupt& interrupt)
      : group_(group), members_(std::move(members)), interrupt_(interrupt) {}

  void set(const std::string& key, const std::string& value) override {
    if (published_) return;
    published_ = true;
    const std::vector<Bytes> all = exchange(group_, bytes_of(key + '\n' + value), interrupt_);
    for (const int member : members_) {
      const Bytes& one = all[static_cast<size_t>(member)];
      const std::string text(reinterpret_cast<const char*>(one.data()), one.size());
      const size_t end = text.find('\n');
      values_[text.substr(0, end)] = text.substr(end + 1);
    }
  }
  std::optional<std::string> get(const std::string& key, Nanoseconds /*timeout*/) override {
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    return found->second;
  }
  void remove(const std::string& key) override { values_.erase(key); }

 private:
  Communicator& group_;
  const std::vector<int> members_;
  const Interrupt& interrupt_;
  std::map<std::string, std::string> values_;
  bool published_ = false;
};

}  // namespace

std::shared_ptr<Communicator> Communicator::split(int color, const Interrupt& interrupt) {
  Bytes mine(sizeof(color));
  std::memcpy(mine.data(), &color, sizeof(color));
  const std::vector<Bytes> colors = exchange(*this, std::move(mine), interrupt);
  std::vector<int> members;
  for (int peer = 0; peer < world_size_; ++peer) {
    int theirs = 0;
    std::memcpy(&theirs, colors[static_cast<size_t>(peer)].data(), sizeof(theirs));
    if (theirs == color) members.push_back(peer);
  }
  if (color < 0) {
    exchange(*this, {}, interrupt);  // the others publish
    return nullptr;
  }
  // The store here keeps no note of a rank that gives up, but this group hears of its own end.
  const Interrupt watch = [&] {
    throw_if_dead();
    if (const auto text = peer_abort()) fail(ErrorKind::aborted, *text);
    for (const int member : members) {
      if (member == rank_ || transport_->peer_state(member) == PeerState::alive) continue;
      fail(ErrorKind::peer_failed, "rank ", member, " has gone while a part of the group was made");
    }
    if (interrupt) interrupt();
  };
  GroupStore store(*this, members, interrupt);
  BootstrapRequest request;
  request.store = &store;
  request.prefix = "split";
  request.rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  request.world_size = static_cast<int>(members.size());
  request.config = config_;
  request.interrupt = watch;
  request.table = table_;
  request.recorder = recorder_;
  return make(request, connector_, timeout_.load(std::memory_order_relaxed));
}

}  // namespace pycoll
