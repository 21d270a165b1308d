#include "transport/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <utility>

#include "core/error.h"
#include "transport/shm/segment.h"

// Linux 6.1; older C libraries do not name it.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pycoll::shm {
namespace {

constexpr uint64_t kGranule = Arena::kGranule;
constexpr size_t kSmallPage = 4096;

// A page of the kernel; on some ARM machines 64 KiB.
uint64_t page_bytes() {
  return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

uint64_t round_up(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Size classes: whole granules up to 16, then eighths of a power of two, so that a block serves
// requests that differ a little. What a request does not touch costs address space only.
uint64_t class_of(uint64_t bytes) {
  const uint64_t eighth = std::bit_floor(std::max<uint64_t>(bytes, 1)) / 8;
  return round_up(std::max<uint64_t>(bytes, 1), std::max(eighth, kGranule));
}

// Makes the process's own copy of each page of a private mapping now, not when it is first written.
void copy_pages(std::byte* begin, uint64_t bytes) {
  if (::madvise(begin, bytes, MADV_POPULATE_WRITE) == 0 || errno != EINVAL) return;
  // Linux before 5.14: writes to each page what it holds, whatever other threads do there.
  for (uint64_t at = 0; at < bytes; at += kSmallPage) {
    const std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(begin + at));
    uint64_t held = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(held, held, std::memory_order_relaxed)) {
    }
  }
}

// Maps the file at a multiple of kGranule, without which it cannot have large pages.
Mapping map_aligned(const UniqueFd& fd, uint64_t bytes) {
  const uint64_t reserved = bytes + kGranule;
  void* place =
      ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) {
    fail(ErrorKind::system, errno_text("mmap"), ": no address space for an arena of ", bytes,
         " bytes");
  }
  auto* const begin = static_cast<std::byte*>(place);
  auto* const base = begin + (kGranule - reinterpret_cast<uintptr_t>(begin) % kGranule) % kGranule;
  if (base != begin) ::munmap(begin, base - begin);
  ::munmap(base + bytes, begin + reserved - (base + bytes));
  Mapping mapping(base, bytes);
  if (::mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd.get(),
             0) == MAP_FAILED) {
    fail(ErrorKind::system, errno_text("mmap of an arena"), ", ", bytes, " bytes");
  }
  return mapping;
}

}  // namespace

std::shared_ptr<Arena> Arena::make(uint64_t bytes) {
  return make(bytes, Options());
}

std::shared_ptr<Arena> Arena::make(uint64_t bytes, const Options& options) {
  const uint64_t whole = bytes / kGranule * kGranule;
  if (whole == 0) {
    fail(ErrorKind::invalid_argument, "an arena of ", bytes, " bytes; it needs at least ",
         kGranule);
  }
  UniqueFd fd = create_segment(whole);
  Mapping mapping = map_aligned(fd, whole);
  ::madvise(mapping.data(), whole, MADV_DONTDUMP);
  return std::shared_ptr<Arena>(new Arena(std::move(fd), std::move(mapping), options));
}

Arena::Arena(UniqueFd fd, Mapping mapping, const Options& options)
    : fd_(std::move(fd)),
      mapping_(std::move(mapping)),
      options_(options),
      use_large_pages_(options.large_pages) {
  space_.emplace(0, mapping_.size());
  // Enough where the kernel gives large pages to shared memory by itself (shmem_enabled=advise).
  if (use_large_pages_) ::madvise(mapping_.data(), mapping_.size(), MADV_HUGEPAGE);
}

void* Arena::allocate(size_t bytes) {
  if (is_foreign()) return nullptr;
  std::optional<Taken> taken;
  // More than there is has no class: rounding it up might overflow.
  const uint64_t wanted = bytes <= this->bytes() ? std::min(class_of(bytes), this->bytes()) : 0;
  if (wanted != 0) taken = take(wanted, bytes);
  if (wanted != 0 && !taken) {
    // The room may be there, in cached blocks of other sizes.
    trim(0);
    taken = take(wanted, bytes);
  }
  if (!taken) {
    const std::lock_guard lock(mutex_);
    ++counts_.refused;
    return nullptr;
  }
  if (taken->fresh) make_large(taken->block, bytes);
  return base() + taken->block.offset;
}

void Arena::free(void* block) noexcept {
  if (is_foreign() || !owns(block)) return;
  const uint64_t offset = static_cast<std::byte*>(block) - base();
  try {
    Block freed;
    bool reusable;
    {
      const std::lock_guard lock(mutex_);
      const auto found = live_.find(offset);
      if (found == live_.end()) return;
      freed = {offset, found->second.bytes};
      reusable = !is_quarantined(freed) && !has_private(freed);
      if (reusable) {
        cached_.push_back(freed);
        cached_bytes_ += freed.bytes;
      }
      counts_.live -= freed.bytes;
      live_.erase(found);
    }
    if (!reusable) return give_back(freed);
    trim(options_.cache_bytes);
  } catch (const std::bad_alloc&) {
    // No memory to write down that there is memory: the block is lost, and nothing else.
  }
}

std::optional<uint64_t> Arena::offset_of(const void* p, size_t length) const noexcept {
  if (is_foreign() || !owns(p)) return std::nullopt;
  const uint64_t offset = static_cast<const std::byte*>(p) - base();
  if (length > bytes() - offset) return std::nullopt;
  // Relaxed: whoever may use a block that was quarantined has heard of it.
  if (any_private_.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(mutex_);
    if (has_private({offset, length})) return std::nullopt;
  }
  return offset;
}

uint64_t Arena::quarantine(uint64_t offset, uint64_t length) {
  if (offset > bytes() || length > bytes() - offset) {
    fail(ErrorKind::invalid_argument, "quarantine of ", length, " bytes at ", offset,
         ", which are not inside an arena of ", bytes(), " bytes");
  }
  if (is_foreign() || length == 0) return 0;
  const Block range{offset, length};
  const std::lock_guard lock(mutex_);
  tickets_.emplace(++last_ticket_, range);
  const auto touched = [&](const Block& each) {
    return each.offset < range.end() && range.offset < each.end();
  };
  for (const Block& each : cached_) {
    if (!touched(each)) continue;
    held_.push_back(each);
    held_bytes_ += each.bytes;
    cached_bytes_ -= each.bytes;
  }
  std::erase_if(cached_, touched);
  hold_space_in(range);
  // With the lock: until all is copied nobody may count on it, nor fork.
  make_private(whole_pages(range));
  return last_ticket_;
}

void Arena::release(uint64_t ticket) noexcept {
  if (is_foreign()) return;
  try {
    std::vector<Block> free_now;
    {
      const std::lock_guard lock(mutex_);
      if (tickets_.erase(ticket) == 0) return;
      const auto first = std::partition(held_.begin(), held_.end(),
                                        [&](const Block& each) { return is_quarantined(each); });
      free_now.assign(first, held_.end());
      held_.erase(first, held_.end());
      for (const Block& each : free_now) held_bytes_ -= each.bytes;
    }
    for (const Block& each : free_now) give_back(each);
  } catch (const std::bad_alloc&) {
    // As in free(): what could not be written down is lost.
  }
}

Arena::Statistics Arena::statistics() const {
  Statistics result;
  result.size = bytes();
  if (is_foreign()) return result;
  struct stat status {};
  if (::fstat(fd_.get(), &status) == 0) result.backed = uint64_t(status.st_blocks) * 512;
  const uint64_t backed = result.backed;
  const std::lock_guard lock(mutex_);
  result = counts_;
  result.size = bytes();
  result.backed = backed;
  result.cached = cached_bytes_;
  result.quarantined = held_bytes_;
  result.blocks = live_.size();
  return result;
}

std::string Arena::large_pages_problem() const {
  if (is_foreign()) return "this process was forked from the one that made the arena";
  const std::lock_guard lock(mutex_);
  return large_pages_problem_;
}

void Arena::after_fork_child() noexcept {
  // Relaxed: the child has one thread, this one.
  foreign_.store(true, std::memory_order_relaxed);
  const uint64_t used = high_water_.load(std::memory_order_relaxed);
  uint64_t begin = 0;
  const auto make_mine = [&](uint64_t end) {
    if (begin >= end) return;
    void* const mine =
        ::mmap(base() + begin, end - begin, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd_.get(), static_cast<off_t>(begin));
    // Rather a child that faults than one that writes into its parent's tensors.
    if (mine == MAP_FAILED) ::mprotect(base() + begin, end - begin, PROT_READ);
  };
  // What is private already is not in the file.
  for (const auto& [offset, end] : private_) {
    make_mine(std::min(offset, used));
    begin = end;
  }
  make_mine(used);
  const uint64_t unused = std::max(used, begin);
  if (unused < bytes()) ::mprotect(base() + unused, bytes() - unused, PROT_NONE);
  fd_.reset();
}

std::optional<Arena::Taken> Arena::take(uint64_t bytes, uint64_t wanted) {
  const std::lock_guard lock(mutex_);
  std::optional<Block> block = take_cached(bytes);
  const bool fresh = !block;
  if (fresh) block = take_space(bytes);
  if (!block) return std::nullopt;
  live_.emplace(block->offset, Live{block->bytes, wanted});
  counts_.live += block->bytes;
  counts_.peak = std::max(counts_.peak, counts_.live);
  ++counts_.allocations;
  if (!fresh) ++counts_.reused;
  return Taken{*block, fresh};
}

std::optional<Arena::Block> Arena::take_cached(uint64_t bytes) {
  // The newest of that size: its lines may still be in a CPU's cache.
  const auto found = std::find_if(cached_.rbegin(), cached_.rend(),
                                  [&](const Block& each) { return each.bytes == bytes; });
  if (found == cached_.rend()) return std::nullopt;
  const Block block = *found;
  cached_.erase(std::next(found).base());
  cached_bytes_ -= block.bytes;
  return block;
}

std::optional<Arena::Block> Arena::take_space(uint64_t bytes) {
  // The lowest that fits: what a child remaps, and peers map, stays short.
  const auto found = std::find_if(space_.begin(), space_.end(),
                                  [&](const auto& each) { return each.second >= bytes; });
  if (found == space_.end()) return std::nullopt;
  const Block block{found->first, bytes};
  const uint64_t left = found->second - bytes;
  space_.erase(found);
  if (left != 0) space_.emplace(block.end(), left);
  if (block.end() > high_water_.load(std::memory_order_relaxed)) {
    high_water_.store(block.end(), std::memory_order_relaxed);
  }
  return block;
}

std::optional<Arena::Block> Arena::take_oldest_beyond(uint64_t cache_bytes) {
  if (cached_bytes_ <= cache_bytes || cached_.empty()) return std::nullopt;
  const Block oldest = cached_.front();
  cached_.erase(cached_.begin());
  cached_bytes_ -= oldest.bytes;
  return oldest;
}

void Arena::add_space(Block block) {
  const auto next = space_.lower_bound(block.offset);
  if (next != space_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == block.offset) {
      block = {before->first, before->second + block.bytes};
      space_.erase(before);
    }
  }
  if (next != space_.end() && next->first == block.end()) {
    block.bytes += next->second;
    space_.erase(next);
  }
  space_.emplace(block.offset, block.bytes);
}

// The free space in that range becomes quarantined blocks: nobody may be given it.
void Arena::hold_space_in(Block range) {
  const uint64_t begin = range.offset / kGranule * kGranule;
  const uint64_t end = round_up(range.end(), kGranule);
  auto each = space_.upper_bound(begin);
  if (each != space_.begin()) --each;
  while (each != space_.end() && each->first < end) {
    const Block extent{each->first, each->second};
    const uint64_t from = std::max(begin, extent.offset);
    const uint64_t to = std::min(end, extent.end());
    if (from >= to) {
      ++each;
      continue;
    }
    held_.push_back({from, to - from});
    held_bytes_ += to - from;
    each = space_.erase(each);
    if (extent.offset < from) space_.emplace(extent.offset, from - extent.offset);
    if (to < extent.end()) space_.emplace(to, extent.end() - to);
  }
}

bool Arena::is_quarantined(const Block& block) const {
  return std::any_of(tickets_.begin(), tickets_.end(), [&](const auto& each) {
    return each.second.offset < block.end() && block.offset < each.second.end();
  });
}

// ---- Pages that are this process's own ----

// Of a range whose ends lie in pages with other memory of the same block, without those.
Arena::Block Arena::whole_pages(Block range) const {
  const uint64_t page = page_bytes();
  const uint64_t begin = round_up(range.offset, page);
  // What lies behind the bytes that were asked for is nobody's.
  const bool to_the_last = range.end() >= wanted_end(range.end() - 1);
  const uint64_t end = to_the_last ? round_up(range.end(), page) : range.end() / page * page;
  return {begin, end > begin ? end - begin : 0};
}

// The end of what was asked for of the live block around `offset`; 0 when there is none.
uint64_t Arena::wanted_end(uint64_t offset) const {
  for (uint64_t at = offset / kGranule * kGranule;; at -= kGranule) {
    if (const auto found = live_.find(at); found != live_.end()) {
      const uint64_t end = at + found->second.bytes;
      return offset < end ? at + found->second.wanted : 0;
    }
    if (at == 0) return 0;
  }
}

bool Arena::has_private(const Block& block) const {
  // Disjoint, so sorted by their ends too: of those that begin before the block's end the last.
  auto after = private_.lower_bound(block.end());
  return after != private_.begin() && std::prev(after)->second > block.offset;
}

// Each page is replaced by a copy of itself, which the kernel makes when it is first written: so
// nothing that other threads write there meanwhile is lost.
void Arena::make_private(Block range) {
  uint64_t begin = range.offset;
  while (begin < range.end()) {
    // A part that is private already must not be mapped anew: its pages would be lost.
    auto next = private_.upper_bound(begin);
    if (next != private_.begin() && std::prev(next)->second > begin) {
      begin = std::prev(next)->second;
      continue;
    }
    const uint64_t end = next == private_.end() ? range.end() : std::min(range.end(), next->first);
    std::byte* const place = base() + begin;
    private_.emplace(begin, end);
    any_private_.store(true, std::memory_order_relaxed);
    // Where the kernel refuses, the peer's last portion may show: the memory is kept aside still.
    if (::mmap(place, end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
               fd_.get(), static_cast<off_t>(begin)) != MAP_FAILED) {
      ::madvise(place, end - begin, MADV_DONTDUMP);
      copy_pages(place, end - begin);
    }
    begin = end;
  }
}

// Maps the file again. False when the kernel refuses: nobody may be given that block.
bool Arena::make_shared(const Block& block) {
  if (!has_private(block)) return true;
  if (::mmap(base() + block.offset, block.bytes, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd_.get(),
             static_cast<off_t>(block.offset)) == MAP_FAILED) {
    return false;
  }
  ::madvise(base() + block.offset, block.bytes, MADV_DONTDUMP);
  if (options_.large_pages) ::madvise(base() + block.offset, block.bytes, MADV_HUGEPAGE);
  // A quarantined range may go beyond the block.
  auto each = private_.lower_bound(block.offset);
  if (each != private_.begin() && std::prev(each)->second > block.offset) --each;
  while (each != private_.end() && each->first < block.end()) {
    const auto [offset, end] = *each;
    each = private_.erase(each);
    if (offset < block.offset) private_.emplace(offset, block.offset);
    if (end > block.end()) each = private_.emplace(block.end(), end).first;
  }
  any_private_.store(!private_.empty(), std::memory_order_relaxed);
  return true;
}

// ---- What asks the kernel ----

void Arena::trim(uint64_t cache_bytes) {
  for (;;) {
    std::optional<Block> oldest;
    {
      const std::lock_guard lock(mutex_);
      oldest = take_oldest_beyond(cache_bytes);
    }
    if (!oldest) return;
    give_back(*oldest);
  }
}

void Arena::give_back(Block block) {
  {
    const std::lock_guard lock(mutex_);
    if (hold_if_quarantined(block) || !make_shared(block)) return;
  }
  punch(block);
  const std::lock_guard lock(mutex_);
  // Somebody may have quarantined it in between.
  if (!hold_if_quarantined(block)) add_space(block);
}

// Its release comes to give_back() again.
bool Arena::hold_if_quarantined(const Block& block) {
  if (!is_quarantined(block)) return false;
  held_.push_back(block);
  held_bytes_ += block.bytes;
  return true;
}

// Large pages for the part of a fresh block that is asked for: each costs its owner less than 512
// small ones, and a peer a fiftieth. The collapse needs one page in each, and works where the
// kernel gives shared memory no large pages by itself.
void Arena::make_large(const Block& block, uint64_t wanted) {
  {
    const std::lock_guard lock(mutex_);
    if (!use_large_pages_) return;
  }
  // The last one if at least half of it is wanted.
  const uint64_t bytes = std::min((wanted + kGranule / 2) / kGranule * kGranule, block.bytes);
  if (bytes == 0) return;
  std::byte* const begin = base() + block.offset;
  for (uint64_t at = 0; at < bytes; at += kGranule) {
    if (::madvise(begin + at, kSmallPage, MADV_POPULATE_WRITE) != 0) break;
  }
  const bool done = ::madvise(begin, bytes, MADV_COLLAPSE) == 0;
  const int error = errno;
  const std::lock_guard lock(mutex_);
  if (done) {
    counts_.large += bytes;
    large_pages_problem_.clear();
    return;
  }
  errno = error;
  large_pages_problem_ = errno_text("MADV_COLLAPSE");
  // Others (no large page to be had just now) may pass.
  if (error == EINVAL) use_large_pages_ = false;
}

void Arena::punch(const Block& block) noexcept {
  // A block that cannot be punched keeps its memory, and is as free as any.
  while (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(block.offset), static_cast<off_t>(block.bytes)) != 0 &&
         errno == EINTR) {
  }
}

}  // namespace pycoll::shm
