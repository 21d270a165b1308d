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
  // or may shrink under our hands: whatever lies there is staged then.
  std::shared_ptr<const PeerArena> map(const UniqueFd& fd, const std::shared_ptr<Arena>& own);

 private:
  using FileId = std::pair<uint64_t, uint64_t>;  // device, inode

  std::mutex mutex_;
  std::map<FileId, std::weak_ptr<const PeerArena>> known_;
};

// Ranges of this process's arena that a peer may still write, though their operation has ended: one
// that has been stopped in the middle, say. They go back when that peer has said that it is out, or
// has died. Groups may be gone by then: there is one Quarantine a process, like the arena.
class Quarantine {
 public:
  struct Borrower {
    SharedMapping segment;  // where it says that it is out
    UniqueFd process;       // a pidfd; without one, only forget() tells of its death
  };

  void add(std::shared_ptr<Arena> arena, std::vector<uint64_t> tickets,
           std::vector<Borrower> borrowers);
  // The owner of that segment has died: it writes no more.
  void forget(const SharedMapping& segment);
  // Gives back what can be.
  void sweep();

  // Around fork(2): nothing is put aside in the child, which has memory of its own.
  void before_fork() { mutex_.lock(); }
  void after_fork_parent() { mutex_.unlock(); }
  void after_fork_child();

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

// For ranges of the process's arena (process_arena()); never destroyed either.
Quarantine& process_quarantine();

}  // namespace pycoll::shm
