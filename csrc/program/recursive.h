// What the recursive algorithms share: pairs at distance 1, 2, 4, ... (or the other way round) that
// exchange chunks, for any number of ranks. Thakur, Rabenseifner and Gropp, "Optimization of
// collective communication operations in MPICH", 2005.
#pragma once

#include <functional>
#include <vector>

#include "program/algorithm.h"

namespace pycoll {

// When world_size is no power of two, the first `extra` pairs (2i, 2i+1) act as one: the odd rank
// is passive, gives what it has to the even one first and gets its result last. The ranks that
// consecutive actives stand for are consecutive too.
struct Fold {
  int32_t actives;  // the power of two that takes part in the exchange
  int32_t extra;    // pairs that act as one

  explicit Fold(int32_t world_size) : actives(1) {
    while (actives * 2 <= world_size) actives *= 2;
    extra = world_size - actives;
  }
  bool is_passive(int32_t rank) const { return rank < 2 * extra && rank % 2 == 1; }
  bool folds(int32_t active) const { return active < extra; }
  int32_t active_of(int32_t rank) const { return rank < 2 * extra ? rank / 2 : rank - extra; }
  // Also for active == actives: the end of the ranks.
  int32_t rank_of(int32_t active) const { return active < extra ? 2 * active : active + extra; }
};

// Chunks [begin, end).
struct ChunkSpan {
  int32_t begin;
  int32_t end;
};

// One active rank's part in an exchange.
struct Exchange {
  Fold fold;
  int32_t active;
  // The chunks that actives [first, first + count) stand for.
  std::function<ChunkSpan(int32_t first, int32_t count)> chunks;
  // Where a complete sum is stored.
  std::function<Ref(int32_t chunk)> result;
};

// Recursive halving: at distance actives/2, ..., 2, 1 a pair splits the chunks it shares; each side
// sends one half's partial sums and adds those it gets for the other. Sums in progress are
// acc[chunk]; to begin with they are input[chunk], or, where the rank folds, acc[chunk] already.
// Both sides of a sum are blocks of actives; the one with the lower ranks stands on the left.
void append_halving(std::vector<Step>& steps, const Exchange& exchange);

// Recursive doubling: at distance 1, 2, 4, ... a pair exchanges all chunks that it has, as output.
void append_doubling(std::vector<Step>& steps, const Exchange& exchange);

}  // namespace pycoll
