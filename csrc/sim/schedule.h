// Which thread runs next: a pure function of the options and of what the threads did before.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/threads.h"

namespace pycoll::sim {

class Schedule {
 public:
  explicit Schedule(const Options& options);

  bool random() const { return policy_ == Policy::random; }
  // True once in `n` times, at random; never with round_robin, or if n is 0.
  bool one_in(unsigned n) { return random() && n != 0 && next() % n == 0; }
  // 0 <= result < n; 0 with round_robin.
  size_t draw(size_t n) { return random() ? next() % n : 0; }

  // Room for that many blocks, so that make_ready(), which threads call, never allocates.
  void reserve(size_t blocks) { active_.reserve(blocks); }
  void make_ready(Thread& thread);
  Thread* pick();  // null: none is ready
  void forget(Block& block);

 private:
  uint64_t next();
  Block& choose();

  Policy policy_;
  unsigned sticky_;
  uint64_t state_;
  std::vector<Block*> active_;  // all with ready threads, and some that have had them
  size_t turn_ = 0;             // round_robin: index of the block that runs
  Block* favourite_ = nullptr;  // random: gets some turns in a row
  unsigned turns_left_ = 0;
};

}  // namespace pycoll::sim
