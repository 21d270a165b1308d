#include "simulator/symmetry.h"

namespace pycoll::simulator {
namespace {

bool power_of_two(int32_t value) {
  return value > 0 && (value & (value - 1)) == 0;
}

}  // namespace

bool Symmetry::possible(SymmetryKind kind, int32_t ranks, int32_t ranks_per_host) {
  if (ranks_per_host <= 0 || ranks % ranks_per_host != 0 || ranks == ranks_per_host) return false;
  if (kind == SymmetryKind::rotation) return true;
  return kind == SymmetryKind::exclusive_or && power_of_two(ranks) && power_of_two(ranks_per_host);
}

int32_t Symmetry::moved(int32_t rank, int32_t g) const {
  switch (kind_) {
    case SymmetryKind::rotation:
      return static_cast<int32_t>((int64_t{rank} + int64_t{g} * per_host_) % ranks_);
    case SymmetryKind::exclusive_or:
      return rank ^ (g * per_host_);
    case SymmetryKind::none:
      break;
  }
  return rank;
}

int32_t Symmetry::moved_back(int32_t rank, int32_t g) const {
  const bool rotates = kind_ == SymmetryKind::rotation && g != 0;
  return moved(rank, rotates ? hosts() - g : g);
}

}  // namespace pycoll::simulator
