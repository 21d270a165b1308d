#include "sim/cuda/shared_event.h"

#include <sys/mman.h>

#include <array>
#include <atomic>

namespace pycoll::sim::cuda {
namespace {

constexpr size_t kWords = 511;

}  // namespace

struct SharedEvent::Page {
  std::atomic<uint64_t> last;
  std::array<std::atomic<uint64_t>, kWords> done;  // [n % kWords]: the last such n that is done
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

SharedEvent::Page* SharedEvent::page() const {
  return reinterpret_cast<Page*>(mapping_.data());
}

bool SharedEvent::map(int fd) {
  // Zeroes of a new memfd are the initial state.
  void* base = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return false;
  mapping_ = Mapping(base, sizeof(Page));
  return true;
}

std::shared_ptr<SharedEvent> SharedEvent::create() {
  auto event = std::make_shared<SharedEvent>();
  event->file_ = create_shared_file(sizeof(Page));
  return event->file_.fd && event->map(event->file_.fd.get()) ? event : nullptr;
}

std::shared_ptr<SharedEvent> SharedEvent::open(const FileName& name) {
  const UniqueFd fd = open_shared_file(name);
  auto event = std::make_shared<SharedEvent>();
  return fd && event->map(fd.get()) ? event : nullptr;
}

uint64_t SharedEvent::issue() {
  return page()->last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Acquire and release: what a record comes after is visible to whoever saw it done.
uint64_t SharedEvent::last() const {
  return page()->last.load(std::memory_order_acquire);
}

void SharedEvent::finish(uint64_t ticket) {
  page()->done[ticket % kWords].store(ticket, std::memory_order_release);
}

bool SharedEvent::finished(uint64_t ticket) const {
  return page()->done[ticket % kWords].load(std::memory_order_acquire) >= ticket;
}

}  // namespace pycoll::sim::cuda
