#include "sim/engine.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <sstream>
#include <thread>
#include <utility>

#include "sim/sanitizers.h"
#include "sim/time_slice.h"
#include "sim/timeline.h"

namespace pycoll::sim {
namespace {

using namespace std::chrono_literals;

constexpr auto kNap = 50us;
constexpr unsigned kYieldsBeforeNaps = 50;
constexpr uint64_t kSwitchesBetweenLooksAtSlice = 64;

thread_local Current running;

// Across executors: blocks of all of them may meet at one flag.
uint64_t next_serial() {
  static std::atomic<uint64_t> serial{0};
  return serial.fetch_add(1, std::memory_order_relaxed);
}

uint3 index_in(uint64_t number, const dim3& shape) {
  return {static_cast<unsigned>(number % shape.x),
          static_cast<unsigned>(number / shape.x % shape.y),
          static_cast<unsigned>(number / shape.x / shape.y)};
}

}  // namespace

Current current() {
  return running;
}

constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};

std::string why_invalid(const Grid& grid) {
  const dim3 &g = grid.grid, &b = grid.block;
  const uint64_t threads = uint64_t{b.x} * b.y * b.z;
  std::ostringstream why;
  if (threads == 0 || threads > 1024 || b.z > 64) {
    why << "a block of (" << b.x << ',' << b.y << ',' << b.z
        << ") threads: 1 to 1024 in all, z at most 64";
  } else if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
    why << "a grid of (" << g.x << ',' << g.y << ',' << g.z
        << ") blocks: none may be 0, y and z at most 65535";
  } else if (grid.shared_bytes > 227 * 1024) {
    why << grid.shared_bytes << " bytes of dynamic shared memory: a block has 232448 at most";
  }
  return why.str();
}

Array make_array(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  if (::posix_memalign(&memory, std::max<size_t>(alignment, 16), bytes) != 0)
    throw std::bad_alloc();
  std::memset(memory, 0xff, bytes);
  return Array(memory);
}

Engine::Engine(const Options& options)
    : options_(options), schedule_(options), stacks_(options.stack_bytes) {}

Engine::~Engine() {
  Quiet quiet;
  end_slice();
  blocks_.clear();
  grids_.clear();
}

void Engine::launch(Grid grid) {
  Quiet quiet;
  if (const std::string why = why_invalid(grid); !why.empty()) fail("invalid launch: " + why);
  auto live = std::make_unique<LiveGrid>(std::move(grid));
  Timeline* const timeline = live->launch.timeline;
  if (timeline != nullptr) timeline->enter();
  tsan_release(&live->start_key);
  if (timeline != nullptr) timeline->leave();
  grids_.push_back(std::move(live));
}

// ---- The GPU that several processes share. ----

bool Engine::begin_slice() {
  TimeSlice* const slice = options_.time_slice;
  if (slice == nullptr || grids_.empty() || slice->running()) return true;
  if (!slice->try_begin()) {
    waits_since_ = Clock::now();  // its own time only counts
    std::this_thread::sleep_for(kNap);
    return false;
  }
  return true;
}

void Engine::end_slice() {
  if (options_.time_slice != nullptr && options_.time_slice->running()) options_.time_slice->end();
}

bool Engine::slice_over() {
  if (options_.time_slice == nullptr) return false;
  return ++switches_in_slice_ % kSwitchesBetweenLooksAtSlice == 0 && options_.time_slice->over();
}

// ---- Blocks and threads. ----

void Engine::thread_main() {
  const Current me = running;
  me.engine->home_.arrived();
  LiveGrid& grid = *me.thread->block->grid;
  tsan_acquire(&grid.start_key);
  grid.launch.body();
  tsan_release(&grid.end_key);
  me.thread->state = ThreadState::exited;
  me.engine->home_.leave_for_good(me.thread->fiber);
}

// One block of each grid at a time, so that kernels of different ranks start together.
void Engine::admit() {
  const auto has_more = [](const auto& grid) { return grid->begun < grid->blocks(); };
  for (bool begun = true; begun && std::any_of(grids_.begin(), grids_.end(), has_more);) {
    begun = false;
    const size_t first = schedule_.draw(grids_.size());
    for (size_t i = 0; i < grids_.size(); ++i) {
      LiveGrid& grid = *grids_[(first + i) % grids_.size()];
      if (grid.begun == grid.blocks()) continue;
      const size_t resident = resident_[grid.launch.device];
      if (options_.max_resident != 0 && resident >= options_.max_resident) continue;
      start_block(grid);
      begun = true;
    }
  }
}

void Engine::start_block(LiveGrid& grid) {
  const dim3& shape = grid.launch.block;
  const size_t size = size_t{shape.x} * shape.y * shape.z;
  auto block = std::make_unique<Block>(&grid, size);
  block->index = index_in(grid.begun++, grid.launch.grid);
  block->serial = next_serial();
  block->warps.resize((size + 31) / 32);
  if (grid.launch.shared_bytes > 0) block->dynamic = make_array(grid.launch.shared_bytes, 16);
  schedule_.reserve(blocks_.size() + 1);
  for (size_t i = 0; i < size; ++i) {
    Thread& thread = block->threads.emplace_back(stacks_.take(), thread_main, factory_);
    thread.block = block.get();
    thread.number = static_cast<unsigned>(i);
    thread.index = index_in(i, shape);
    schedule_.make_ready(thread);
  }
  block->live = size;
  live_ += size;
  stats_.threads += size;
  const size_t resident = ++resident_[grid.launch.device];
  stats_.most_resident = std::max<uint64_t>(stats_.most_resident, resident);
  blocks_.push_back(std::move(block));
  progressed();
}

void Engine::end_block(Block& block) {
  schedule_.forget(block);
  for (const Thread& thread : block.threads) stacks_.give_back(thread.fiber.stack());
  --resident_[block.grid->launch.device];
  ++block.grid->ended;
  const auto same = [&](const auto& each) { return each.get() == &block; };
  blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(), same));
}

std::unique_ptr<LiveGrid> Engine::thread_exited(Thread& thread) {
  Block& block = *thread.block;
  for (const auto& group : block.warps[thread.number / 32]) {
    if (group->arrived != 0 && (group->mask >> thread.lane() & 1) != 0) {
      fail("a lane exited while lanes of its warp wait for it", &block);
    }
  }
  --live_;
  progressed();
  if (--block.live > 0) {
    if (block.arrived > 0) {
      fail("a thread exited while others of its block wait at __syncthreads (divergence)", &block);
    }
    return nullptr;
  }
  LiveGrid* const grid = block.grid;
  end_block(block);
  if (grid->ended < grid->blocks()) {
    admit();
    return nullptr;
  }
  const auto found = std::find_if(grids_.begin(), grids_.end(),
                                  [&](const auto& each) { return each.get() == grid; });
  std::unique_ptr<LiveGrid> ended = std::move(*found);
  grids_.erase(found);
  return ended;
}

// ---- Running. ----

void Engine::claim_owner() {
  if (owned_ && pthread_equal(owner_, pthread_self()) == 0 && !blocks_.empty()) {
    fail("an executor is stepped by another OS thread than the one that began its blocks");
  }
  owner_ = pthread_self();
  owned_ = true;
}

bool Engine::step(uint64_t max_switches) {
  if (!begin_slice()) return true;
  home_.begin();
  while (true) {
    std::unique_ptr<LiveGrid> ended;
    {
      Quiet quiet;
      claim_owner();
      admit();
      ended = advance(max_switches);
    }
    if (ended == nullptr) break;
    finish(std::move(ended));
  }
  if (grids_.empty()) {
    end_slice();
  } else if (options_.time_slice != nullptr && options_.time_slice->over()) {
    end_slice();
    std::this_thread::sleep_for(4 * kNap);  // those who wait look once in a nap
  }
  return !grids_.empty();
}

// Until a grid has ended, which it returns, or the switches or the slice are used up.
std::unique_ptr<LiveGrid> Engine::advance(uint64_t& switches) {
  while (switches > 0 && !slice_over()) {
    Thread* const thread = schedule_.pick();
    if (thread == nullptr) break;
    --switches;
    resume(*thread);
    if (auto ended = after(*thread)) return ended;
    look_for_deadlock();
  }
  if (switches > 0 && live_ > 0 && blocked_ == live_) {
    fail("deadlock: every thread waits for another one" + occupancy());
  }
  return nullptr;
}

void Engine::resume(Thread& thread) {
  ++stats_.switches;
  threadIdx = thread.index;
  blockIdx = thread.block->index;
  blockDim = thread.block->grid->launch.block;
  gridDim = thread.block->grid->launch.grid;
  running = {this, &thread};
  home_.resume(thread.fiber);
  running = {};
}

std::unique_ptr<LiveGrid> Engine::after(Thread& thread) {
  if (thread.state == ThreadState::exited) return thread_exited(thread);
  if (thread.state == ThreadState::ready) schedule_.make_ready(thread);
  return nullptr;
}

void Engine::finish(std::unique_ptr<LiveGrid> grid) {
  Timeline* const timeline = grid->launch.timeline;
  if (timeline != nullptr) timeline->enter();
  tsan_acquire(&grid->end_key);
  if (timeline != nullptr) timeline->leave();
  if (grid->launch.done) grid->launch.done();
  Quiet quiet;
  grid.reset();
}

Stats Engine::run() {
  const auto began = Clock::now();
  while (step(~uint64_t{0})) {
  }
  stats_.seconds = std::chrono::duration<double>(Clock::now() - began).count();
  return std::exchange(stats_, Stats{});
}

// ---- For threads that run. ----

void Engine::suspend(Thread& thread) {
  home_.leave(thread.fiber);
}

void Engine::block(Thread& thread, ThreadState state) {
  thread.state = state;
  if (thread.stuck_since == changes_) {
    thread.stuck_since = 0;
    --stuck_;
  }
  ++blocked_;
  suspend(thread);
}

void Engine::wake(Thread& thread) {
  --blocked_;
  schedule_.make_ready(thread);
}

void Engine::progressed() {
  ++changes_;
  stuck_ = 0;
  idle_spins_ = 0;
  waits_outside_ = false;
}

void Engine::spun(Thread& thread) {
  ++stats_.spins;
  if (thread.stuck_since != changes_) {
    thread.stuck_since = changes_;
    ++stuck_;
  }
  if (stuck_ + blocked_ < live_) return;
  ++idle_spins_;
  ++stats_.outside_spins;
  if (options_.time_slice != nullptr) options_.time_slice->count_spin();
}

// ---- When nothing changes. ----

void Engine::look_for_deadlock() {
  if (idle_spins_ == 0) return;
  if (options_.external) {
    // Each has looked once more; then it is the others' turn to have the CPU.
    if (idle_spins_ % (live_ - blocked_ + 1) == 0) wait_outside();
    return;
  }
  // A thread may bound its waiting by a count; most give up or go on within these.
  if (idle_spins_ > 2000 + 100 * live_) {
    fail("deadlock: every thread waits and nothing changes" + occupancy());
  }
}

void Engine::wait_outside() {
  if (!waits_outside_) {
    waits_outside_ = true;
    waits_since_ = Clock::now();
    naps_ = 0;
  }
  if (++naps_ < kYieldsBeforeNaps) {
    ::sched_yield();
  } else {
    std::this_thread::sleep_for(kNap);
  }
  const double waited = std::chrono::duration<double>(Clock::now() - waits_since_).count();
  if (waited > options_.timeout_s) {
    std::ostringstream why;
    why << "timeout: for " << waited << " s every thread here has waited for somebody outside";
    fail(why.str() + occupancy());
  }
}

std::string Engine::occupancy() const {
  std::ostringstream out;
  for (const auto& grid : grids_) {
    const uint64_t waiting = grid->blocks() - grid->begun;
    if (waiting == 0) continue;
    out << "; " << waiting << " blocks wait for room on device " << grid->launch.device
        << " (max_resident " << options_.max_resident << ")";
  }
  return out.str();
}

void Engine::fail(const std::string& why, const Block* only) const {
  Quiet quiet;
  std::ostringstream out;
  out << "simt: " << why << '\n' << describe_threads({blocks_, changes_}, only) << "  schedule: ";
  if (options_.policy == Policy::random) {
    out << "random, seed " << options_.seed << '\n';
  } else {
    out << "round robin\n";
  }
  end_process(out.str(), options_.on_failure);
}

// ---- simt.h ----

Executor::Executor(const Options& options) : engine_(std::make_unique<Engine>(options)) {}
Executor::~Executor() = default;
void Executor::launch(Grid grid) {
  engine_->launch(std::move(grid));
}
bool Executor::step(uint64_t max_switches) {
  return engine_->step(max_switches);
}
Stats Executor::run() {
  return engine_->run();
}
const Stats& Executor::stats() const {
  return engine_->stats();
}

}  // namespace pycoll::sim
