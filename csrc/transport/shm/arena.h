// Memory of this process that its peers on the same host can map: one sparse, sealed memfd, mapped
// once, and cut into blocks. A peer maps the file once for ever, and an address of ours is an
// offset there; a descriptor a tensor would cost a descriptor, a mapping and its page faults for
// each.
//
// What this is for is communication buffers, not all memory of a program: a forked child sees what
// its parent writes later (see process_arena below), and peers may write.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/fd.h"

namespace pycoll::shm {

class Arena {
 public:
  // Blocks are multiples of this, so that none shares a large page with another.
  static constexpr uint64_t kGranule = uint64_t{2} << 20;

  struct Options {
    // Freed blocks keep their memory up to this; beyond it the oldest give theirs back. First
    // touch costs more than the reduction of the same bytes, so a loop that allocates and frees
    // must find its pages again.
    uint64_t cache_bytes = uint64_t{512} << 20;
    bool large_pages = true;
  };

  // All in bytes, but for the counts.
  struct Statistics {
    uint64_t size = 0;         // of the arena: address space, not memory
    uint64_t live = 0;         // in blocks that somebody holds
    uint64_t peak = 0;         // the most that was ever live
    uint64_t cached = 0;       // in freed blocks that keep their memory
    uint64_t quarantined = 0;  // in freed blocks that a peer may still write
    uint64_t backed = 0;       // memory that the kernel has given to the arena
    uint64_t large = 0;        // memory made into large pages, ever
    uint64_t blocks = 0;       // that are live
    uint64_t allocations = 0;  // that were served, ever
    uint64_t reused = 0;       // of them, from the cache
    uint64_t refused = 0;      // allocations that found no room
  };

  // Throws Error(system) when the kernel refuses, Error(invalid_argument) for less than one
  // granule. `bytes` is rounded down to whole granules.
  static std::shared_ptr<Arena> make(uint64_t bytes);
  static std::shared_ptr<Arena> make(uint64_t bytes, const Options& options);

  // All blocks must have been freed, or never be touched again.
  ~Arena() = default;

  int fd() const { return fd_.get(); }  // -1 in a forked child
  uint64_t bytes() const { return mapping_.size(); }
  std::byte* base() const { return mapping_.data(); }

  // Uninitialised memory, aligned to kGranule; nullptr when there is no room for it, or in a forked
  // child. Any thread may free it.
  void* allocate(size_t bytes);
  // Ignored in a forked child, whose copy is the parent's memory, and for what is no block.
  void free(void* block) noexcept;

  // One comparison: also in a forked child, so that its frees come to free() above.
  bool owns(const void* p) const noexcept {
    return reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(base()) < bytes();
  }
  // Where [p, p + bytes) lies for a peer; nothing unless all of it is inside, none of it has been
  // made this process's own (quarantine), and this process made the arena: a forked child's pages
  // are its own.
  std::optional<uint64_t> offset_of(const void* p, size_t bytes) const noexcept;

  // From here on no block that touches [offset, offset + bytes) is reused or gives its memory back,
  // whoever frees it, until release(): a peer may write there after an operation was given up.
  // Nor do its writes reach a block that lives on, whose owner may have filled it anew: the whole
  // pages of the range become this process's own, with what they hold, until the block is freed. A
  // page that the range shares with other memory of its block stays as it is: a peer may be about
  // to write its part of that, in another operation.
  // Throws Error(invalid_argument) when the range is not inside. In a forked child both do nothing.
  uint64_t quarantine(uint64_t offset, uint64_t bytes);
  void release(uint64_t ticket) noexcept;

  Statistics statistics() const;
  // Why blocks do not get large pages; empty while they do.
  std::string large_pages_problem() const;

  // Around fork(), in this order. The lock is held across it, so the child's copy of the records is
  // whole; the child makes its view of the memory private and leaves the records alone.
  void before_fork() { mutex_.lock(); }
  void after_fork_parent() { mutex_.unlock(); }
  void after_fork_child() noexcept;

 private:
  struct Block {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t end() const { return offset + bytes; }
  };
  struct Live {
    uint64_t bytes;
    uint64_t wanted;  // of them
  };
  struct Taken {
    Block block;
    bool fresh;  // it has no memory behind it yet
  };

  Arena(UniqueFd fd, Mapping mapping, const Options& options);

  // A child never takes the lock: at fork() another thread of the parent may have been inside.
  bool is_foreign() const noexcept { return foreign_.load(std::memory_order_relaxed); }

  // With the lock held:
  std::optional<Block> take_cached(uint64_t bytes);
  std::optional<Block> take_space(uint64_t bytes);
  std::optional<Block> take_oldest_beyond(uint64_t cache_bytes);
  void add_space(Block block);
  void hold_space_in(Block range);
  bool is_quarantined(const Block& block) const;
  bool hold_if_quarantined(const Block& block);
  Block whole_pages(Block range) const;
  uint64_t wanted_end(uint64_t offset) const;
  void make_private(Block range);
  bool has_private(const Block& block) const;
  bool make_shared(const Block& block);

  // Without it; what asks the kernel takes milliseconds:
  std::optional<Taken> take(uint64_t bytes, uint64_t wanted);
  void trim(uint64_t cache_bytes);
  void give_back(Block block);
  void make_large(const Block& block, uint64_t wanted);
  void punch(const Block& block) noexcept;

  UniqueFd fd_;
  Mapping mapping_;
  const Options options_;
  std::atomic<bool> foreign_{false};
  // End of the highest block ever: what lies behind was never touched.
  std::atomic<uint64_t> high_water_{0};

  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> space_;           // offset -> bytes: free, no memory, coalesced
  std::unordered_map<uint64_t, Live> live_;      // by offset
  std::vector<Block> cached_;                    // oldest first
  std::vector<Block> held_;                      // freed, and quarantined
  std::unordered_map<uint64_t, Block> tickets_;  // quarantined ranges
  std::map<uint64_t, uint64_t> private_;         // offset -> end: mapped privately; disjoint
  std::atomic<bool> any_private_{false};         // there is one: most often none, and no lock then
  uint64_t last_ticket_ = 0;
  uint64_t cached_bytes_ = 0;
  uint64_t held_bytes_ = 0;
  Statistics counts_;
  bool use_large_pages_;
  std::string large_pages_problem_;
};

// The arena that everything in this process allocates from, made at first use; nullptr when it
// cannot be made, and then all memory is ordinary and travels through staging buffers.
//
// This is the one process-wide object of pycoll, because an allocator is process-wide by nature: a
// block is freed by whoever holds it last, on any thread, after any group. It is never destroyed:
// tensors are freed while the interpreter ends, after static destructors have begun to run.
//
// After fork() the child has a private view of the blocks: it may read and write them as ever and
// reaches nobody else's memory. What it reads is no snapshot: pages that it has not written show
// what the parent writes later.
std::shared_ptr<Arena> process_arena();
// The same if it has been made, else nullptr; costs one load.
Arena* existing_process_arena() noexcept;
// Why process_arena() is nullptr; empty while it is not.
std::string process_arena_problem();
// How much of the address space that this process may use (ulimit -v) its own arena takes at most,
// and the peers' together: so half is left for all else. UINT64_MAX where there is no limit.
uint64_t address_space_share() noexcept;

}  // namespace pycoll::shm
