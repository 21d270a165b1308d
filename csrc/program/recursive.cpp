#include "program/recursive.h"

#include <algorithm>

#include "program/builders.h"

namespace pycoll {
namespace {

// Both sides send and receive in turns: however many chunks there are, one slot a FIFO suffices.
void in_turns(std::vector<Step>& steps, const std::vector<Step>& sends,
              const std::vector<Step>& receives) {
  for (size_t i = 0; i < std::max(sends.size(), receives.size()); ++i) {
    if (i < sends.size()) steps.push_back(sends[i]);
    if (i < receives.size()) steps.push_back(receives[i]);
  }
}

// The first of the `count` actives that this one belongs to.
int32_t block_of(int32_t active, int32_t count) {
  return active & ~(count - 1);
}

}  // namespace

void append_halving(std::vector<Step>& steps, const Exchange& exchange) {
  const Fold& fold = exchange.fold;
  const int32_t active = exchange.active;
  bool has_sums = fold.folds(active);
  for (int32_t distance = fold.actives / 2; distance >= 1; distance /= 2) {
    const int32_t partner = active ^ distance;
    const bool first = distance == fold.actives / 2;
    const auto own = [&](int32_t chunk) { return has_sums ? acc(chunk) : input(chunk); };
    const ChunkSpan given = exchange.chunks(block_of(partner, distance), distance);
    const ChunkSpan kept = exchange.chunks(block_of(active, distance), distance);
    std::vector<Step> sends;
    std::vector<Step> receives;
    for (int32_t chunk = given.begin; chunk < given.end; ++chunk) {
      sends.push_back({.kind = StepKind::send, .src = own(chunk), .to = fold.rank_of(partner)});
    }
    for (int32_t chunk = kept.begin; chunk < kept.end; ++chunk) {
      receives.push_back({.kind = StepKind::recv_reduce,
                          .src = own(chunk),
                          .dst = distance == 1 ? exchange.result(chunk) : acc(chunk),
                          .from = fold.rank_of(partner),
                          .wire = first && !fold.folds(partner) ? Wire::value : Wire::partial,
                          .received_first = partner < active});
    }
    in_turns(steps, sends, receives);
    has_sums = true;
  }
}

void append_doubling(std::vector<Step>& steps, const Exchange& exchange) {
  const Fold& fold = exchange.fold;
  for (int32_t distance = 1; distance < fold.actives; distance *= 2) {
    const int32_t partner = exchange.active ^ distance;
    const int32_t peer = fold.rank_of(partner);
    const ChunkSpan mine = exchange.chunks(block_of(exchange.active, distance), distance);
    const ChunkSpan theirs = exchange.chunks(block_of(partner, distance), distance);
    std::vector<Step> sends;
    std::vector<Step> receives;
    for (int32_t chunk = mine.begin; chunk < mine.end; ++chunk) {
      sends.push_back({.kind = StepKind::send, .src = output(chunk), .to = peer});
    }
    for (int32_t chunk = theirs.begin; chunk < theirs.end; ++chunk) {
      receives.push_back({.kind = StepKind::recv, .dst = output(chunk), .from = peer});
    }
    in_turns(steps, sends, receives);
  }
}

}  // namespace pycoll
