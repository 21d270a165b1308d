// Peers' arenas (arena.h) as this process sees them: each mapped once, for all groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/fd.h"
#include "transport/shm/arena.h"
#include "transport/shm/segment.h"

namespace pycoll::shm {

// Another process's arena, or this one's own when ranks are threads of one process: then both see
// the same addresses.
class PeerArena {
 public:
  explicit PeerArena(Mapping mapping)
      : mapping_(std::move(mapping)), base_(mapping_.data()), bytes_(mapping_.size()) {}
  explicit PeerArena(std::shared_ptr<Arena> own)
      : own_(std::move(own)), base_(own_->base()), bytes_(own_->bytes()) {}

  uint64_t bytes() const { return bytes_; }
  // nullptr when the range is not all inside.
  std::byte* at(uint64_t offset, uint64_t bytes) const {
    return offset > bytes_ || bytes > bytes_ - offset ? nullptr : base_ + offset;
  }

 private:
  Mapping mapping_;
  std::shared_ptr<Arena> own_;
  std::byte* base_;
  uint64_t bytes_;
};

class ArenaMapper {
 public:
  // `own`: this process's arena, or nullptr. The answer is nullptr where the file cannot be mapped,
  // would take address space that the rest of the program may need (ulimit -v), or may shrink under
  // our hands: whatever lies there is staged then.
  std::shared_ptr<const PeerArena> map(const UniqueFd& fd, const std::shared_ptr<Arena>& own);

 private:
  using FileId = std::pair<uint64_t, uint64_t>;  // device, inode

  std::mutex mutex_;
  std::map<FileId, std::weak_ptr<const PeerArena>> known_;
};

// A peer that works on this process's memory.
struct Borrower {
  SharedMapping segment;                    // where it says whether it is out
  std::shared_ptr<const UniqueFd> process;  // a pidfd; nullptr where there are none

  // It writes no more. Without a pidfd a process that has died is not known by this.
  bool is_out() const;
};

// Ranges of this process's arena that a peer may still write, though their operation has ended: one
// that has been stopped in the middle, say. They go back when that peer has said that it is out, or
// its process has ended, however many groups and connectors have come and gone since.
class Quarantine {
 public:
  void add(std::shared_ptr<Arena> arena, std::vector<uint64_t> tickets,
           std::vector<Borrower> borrowers);
  // The owner of that segment has died: it writes no more.
  void forget(const SharedMapping& segment);
  // Gives back what can be.
  void sweep();

  // Around fork(), as Arena's: taken before an arena's. The child's memory is its own.
  void before_fork() { mutex_.lock(); }
  void after_fork_parent() { mutex_.unlock(); }
  void after_fork_child() {
    entries_.clear();
    mutex_.unlock();
  }

 private:
  struct Entry {
    std::shared_ptr<Arena> arena;
    std::vector<uint64_t> tickets;
    std::vector<Borrower> borrowers;
  };

  void sweep_held();

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

// That of the process's arena, as lasting as that is.
Quarantine& process_quarantine() noexcept;

}  // namespace pycoll::shm
