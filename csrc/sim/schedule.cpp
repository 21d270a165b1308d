#include "sim/schedule.h"

#include <algorithm>

namespace pycoll::sim {

Schedule::Schedule(const Options& options)
    : policy_(options.policy), sticky_(std::max(1u, options.sticky)), state_(options.seed) {}

// splitmix64 (Steele, Lea, Flood, 2014): any seed will do, 0 too.
uint64_t Schedule::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void Schedule::make_ready(Thread& thread) {
  Block& block = *thread.block;
  thread.state = ThreadState::ready;
  block.ready.push(&thread);
  if (!block.active) {
    block.active = true;
    active_.push_back(&block);
  }
}

// A favourite for a while instead of a new draw each time: blocks that always advance together
// would hide what needs one rank to be far ahead of another.
Block& Schedule::choose() {
  if (policy_ == Policy::round_robin) {
    if (turn_ >= active_.size()) turn_ = 0;
    return *active_[turn_];
  }
  if (favourite_ == nullptr || turns_left_ == 0) {
    favourite_ = active_[draw(active_.size())];
    turns_left_ = 1 + static_cast<unsigned>(draw(2 * sticky_));
  }
  --turns_left_;
  return *favourite_;
}

Thread* Schedule::pick() {
  while (!active_.empty()) {
    Block& block = choose();
    if (block.ready.empty()) {
      forget(block);
      continue;
    }
    const bool last = block.ready.size() == 1;
    Thread* const thread = block.ready.pop(draw(block.ready.size()));
    if (thread->spinning || last) ++turn_;
    return thread;
  }
  return nullptr;
}

void Schedule::forget(Block& block) {
  if (favourite_ == &block) favourite_ = nullptr;
  if (!block.active) return;
  block.active = false;
  const auto found = std::find(active_.begin(), active_.end(), &block);
  if (static_cast<size_t>(found - active_.begin()) < turn_) --turn_;
  active_.erase(found);
}

}  // namespace pycoll::sim
