// Groups made of ranks of a group.
#include <algorithm>
#include <cstring>
#include <map>

#include "core/error.h"
#include "runtime/communicator.h"

namespace pycoll {
namespace {

using Bytes = std::vector<std::byte>;

// How the ranks of a group talk while a part of it is made.
struct Talk {
  Communicator& group;
  const Interrupt& interrupt;
  const OverCodec& over;
};

// Everybody's bytes, of any length, by rank.
std::vector<Bytes> exchange(const Talk& talk, Bytes mine) {
  Communicator& group = talk.group;
  const auto world = static_cast<size_t>(group.world_size());
  std::vector<uint64_t> lengths(world);
  uint64_t length = mine.size();
  CallRequest sizes;
  sizes.collective = Collective::all_gather;
  sizes.dtype = DType::uint64;
  sizes.over = talk.over;
  sizes.input.blocks.push_back({reinterpret_cast<std::byte*>(&length), 1});
  for (uint64_t& one : lengths) {
    sizes.output.blocks.push_back({reinterpret_cast<std::byte*>(&one), 1});
  }
  group.run(std::move(sizes), talk.interrupt);

  std::vector<Bytes> all;
  for (const uint64_t one : lengths) all.emplace_back(one);
  CallRequest contents;
  contents.collective = Collective::all_gather;
  contents.over = talk.over;
  contents.input.blocks.push_back({mine.data(), mine.size()});
  for (Bytes& one : all) contents.output.blocks.push_back({one.data(), one.size()});
  group.run(std::move(contents), talk.interrupt);
  return all;
}

Bytes bytes_of(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

// Plays the store for ranks that have a group already. What each of them publishes first, all of
// them get, by that group. Nothing else is kept: of a rank that gives up its peers hear by that
// group (Communicator::split).
class GroupStore final : public Store {
 public:
  GroupStore(const Talk& talk, std::vector<int> members)
      : talk_(talk), members_(std::move(members)) {}

  void set(const std::string& key, const std::string& value) override {
    if (published_) return;
    const std::vector<Bytes> all = exchange(talk_, bytes_of(key + '\n' + value));
    published_ = true;
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
  std::optional<std::string> peek(const std::string& key) override { return get(key, {}); }
  void remove(const std::string& key) override { values_.erase(key); }

  // For a rank that fails: where it has not published, the others wait for that in the group.
  void withdraw() {
    if (published_) return;
    exchange(talk_, {});
    published_ = true;
  }

 private:
  const Talk talk_;
  const std::vector<int> members_;
  std::map<std::string, std::string> values_;
  bool published_ = false;
};

}  // namespace

std::shared_ptr<Communicator> Communicator::split(int color, const Interrupt& interrupt,
                                                  const OverCodec& over) {
  const Talk talk{*this, interrupt, over};
  Bytes mine(sizeof(color));
  std::memcpy(mine.data(), &color, sizeof(color));
  const std::vector<Bytes> colors = exchange(talk, std::move(mine));
  std::vector<int> members;
  for (int peer = 0; peer < world_size_; ++peer) {
    int theirs = 0;
    std::memcpy(&theirs, colors[static_cast<size_t>(peer)].data(), sizeof(theirs));
    if (theirs == color) members.push_back(peer);
  }
  // From here on a rank may fail alone, and the group goes on: by this call the others hear of it.
  CallHeader making;
  making.codec = kSplit;
  making = take_place(making);
  if (color < 0) {
    exchange(talk, {});  // the others publish
    return nullptr;
  }
  const Interrupt watch = [&] {
    throw_if_dead();
    if (const auto text = peer_abort()) fail(ErrorKind::aborted, *text);
    for (const int member : members) look_at_maker(member, making.sequence);
    if (interrupt) interrupt();
  };
  GroupStore store(talk, members);
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
  try {
    return make(request, connector_, timeout_.load(std::memory_order_relaxed));
  } catch (...) {
    // A child that a signal handler has forked is nobody to the peers.
    if (fork_mark_.in_child()) throw;
    making.root = kSplitFailed;
    try {
      show_elsewhere(making);
      store.withdraw();
    } catch (...) {
      // It is out of step with the others, who would wait for it.
      if (!dead()) abort(concat("it failed in ", to_string(making)));
    }
    throw;
  }
}

// Throws when that rank will not come to the part of the group that this split makes.
void Communicator::look_at_maker(int member, uint64_t sequence) const {
  if (member == rank_) return;
  if (transport_->peer_state(member) != PeerState::alive) {
    fail(ErrorKind::peer_failed, "rank ", member, " has gone while a part of the group was made");
  }
  const auto theirs = transport_->call_of(member, sequence);
  if (theirs && theirs->codec == kSplit && theirs->root == kSplitFailed) {
    fail(ErrorKind::peer_failed, "rank ", member, " failed in ", to_string(*theirs),
         ", where a part of the group was made. Look at that rank's own output for the reason");
  }
}

}  // namespace pycoll
