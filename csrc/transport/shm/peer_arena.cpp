#include "transport/shm/peer_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "transport/shm/layout.h"
#include "transport/shm/packet.h"

namespace pycoll::shm {

std::shared_ptr<const PeerArena> ArenaMapper::map(const UniqueFd& fd,
                                                  const std::shared_ptr<Arena>& own) {
  struct stat status {};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd.get(), &status) != 0) return nullptr;
  struct stat ours {};
  if (own != nullptr && ::fstat(own->fd(), &ours) == 0 && ours.st_dev == status.st_dev &&
      ours.st_ino == status.st_ino) {
    return std::make_shared<const PeerArena>(own);
  }

  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [](const auto& each) { return each.second.expired(); });
  auto& known = known_[FileId(status.st_dev, status.st_ino)];
  if (auto existing = known.lock()) return existing;
  const auto bytes = static_cast<size_t>(status.st_size);
  const uint64_t share = address_space_share();
  uint64_t taken = 0;
  for (const auto& [id, each] : known_) {
    if (const auto mapped = each.lock()) taken += mapped->bytes();
  }
  if (taken > share || bytes > share - taken) return nullptr;
  void* base =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (base == MAP_FAILED) return nullptr;
  // A forked child has no business there, and a core file need not hold the peers' memory.
  ::madvise(base, bytes, MADV_DONTFORK);
  ::madvise(base, bytes, MADV_DONTDUMP);
  auto mapped = std::make_shared<const PeerArena>(Mapping(base, bytes));
  known = mapped;
  return mapped;
}

bool Borrower::is_out() const {
  const auto& control = *reinterpret_cast<const ControlBlock*>(segment->data());
  // Acquire: what it wrote comes before whatever the next owner of the memory does.
  if (control.borrowing.load(std::memory_order_acquire) == 0) return true;
  return process != nullptr && has_exited(*process);
}

void Quarantine::add(std::shared_ptr<Arena> arena, std::vector<uint64_t> tickets,
                     std::vector<Borrower> borrowers) {
  const std::lock_guard lock(mutex_);
  entries_.push_back({std::move(arena), std::move(tickets), std::move(borrowers)});
}

void Quarantine::forget(const SharedMapping& segment) {
  const std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) {
    std::erase_if(entry.borrowers, [&](const Borrower& each) { return each.segment == segment; });
  }
  sweep_held();
}

void Quarantine::sweep() {
  const std::lock_guard lock(mutex_);
  sweep_held();
}

void Quarantine::sweep_held() {
  std::erase_if(entries_, [](Entry& entry) {
    std::erase_if(entry.borrowers, [](const Borrower& each) { return each.is_out(); });
    if (!entry.borrowers.empty()) return false;
    for (const uint64_t ticket : entry.tickets) entry.arena->release(ticket);
    return true;
  });
}

}  // namespace pycoll::shm
