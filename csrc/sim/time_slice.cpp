#include "sim/time_slice.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

#include "core/fd.h"

namespace pycoll::sim {
namespace {

// At the start of the file.
struct Shared {
  std::atomic<uint64_t> spins;
  // The last that looked for its turn in vain, and when. A stale one is a process that has died or
  // needs no turn any more.
  std::atomic<uint64_t> waited_ns;
  std::atomic<uint64_t> waiter;
  std::atomic<uint64_t> members;  // that there have been: each has a number
};

constexpr uint64_t kStaleNs = 20'000'000;

uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);  // one clock for all processes of the machine
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

struct TimeSlice::State {
  UniqueFd file;
  Mapping mapping;
  uint64_t slice_ns = 0;
  uint64_t number = 0;
  bool running = false;
  uint64_t began_ns = 0;

  Shared& shared() const { return *reinterpret_cast<Shared*>(mapping.data()); }
};

TimeSlice::TimeSlice(const std::string& path, double slice_s) : state_(new State) {
  state_->file = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!state_->file) throw_errno("cannot open " + path);
  // Every process gives it the same size; what is in it stays.
  if (::ftruncate(state_->file.get(), sizeof(Shared)) != 0) throw_errno("cannot size " + path);
  void* const base =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, state_->file.get(), 0);
  if (base == MAP_FAILED) throw_errno("cannot map " + path);
  state_->mapping = Mapping(base, sizeof(Shared));
  state_->slice_ns = static_cast<uint64_t>(slice_s * 1e9);
  state_->number = 1 + state_->shared().members.fetch_add(1, std::memory_order_relaxed);
}

TimeSlice::~TimeSlice() = default;

// Counts and times only: nothing else is read because of them, so relaxed throughout.
uint64_t TimeSlice::spins_across_processes() const {
  return state_->shared().spins.load(std::memory_order_relaxed);
}

bool TimeSlice::try_begin() {
  if (::flock(state_->file.get(), LOCK_EX | LOCK_NB) == 0) {
    state_->running = true;
    state_->began_ns = now_ns();
    return true;
  }
  state_->shared().waiter.store(state_->number, std::memory_order_relaxed);
  state_->shared().waited_ns.store(now_ns(), std::memory_order_relaxed);
  return false;
}

void TimeSlice::end() {
  ::flock(state_->file.get(), LOCK_UN);
  state_->running = false;
}

bool TimeSlice::running() const {
  return state_->running;
}

bool TimeSlice::over() const {
  const uint64_t now = now_ns();
  if (!state_->running || now - state_->began_ns < state_->slice_ns) return false;
  const Shared& shared = state_->shared();
  const uint64_t waited = shared.waited_ns.load(std::memory_order_relaxed);
  return shared.waiter.load(std::memory_order_relaxed) != state_->number && now < waited + kStaleNs;
}

void TimeSlice::count_spin() {
  state_->shared().spins.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace pycoll::sim
