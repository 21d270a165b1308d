// Ranks that cannot be told apart need only be simulated once.
//
// A symmetry is a group of permutations of the ranks that moves whole hosts: rotation by hosts
// (rings) or exclusive or with a multiple of the ranks of a host (halving and doubling). When the
// Program of g(r) is the Program of r with its peers moved by g, for every r and g, and slices have
// the same lengths, then all hosts see the same events at the same times. So host 0 stands for all:
// a message that leaves it for another host arrives as the one that comes from the host that is
// there under g^-1. No g but the identity leaves a host where it is, hence what the ranks of one
// host share (cores, memory, its port) is shared in host 0 by as many. This is exact, not an
// approximation.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace pycoll::simulator {

enum class SymmetryKind : uint8_t { none, rotation, exclusive_or };

class Symmetry {
 public:
  Symmetry(SymmetryKind kind, int32_t ranks, int32_t ranks_per_host)
      : kind_(kind), ranks_(ranks), per_host_(ranks_per_host) {}

  // Whether the permutations exist at all.
  static bool possible(SymmetryKind kind, int32_t ranks, int32_t ranks_per_host);

  SymmetryKind kind() const { return kind_; }
  // Ranks that have to be simulated: 0 to simulated() - 1.
  int32_t simulated() const { return kind_ == SymmetryKind::none ? ranks_ : per_host_; }
  int32_t hosts() const { return ranks_ / per_host_; }

  // Where permutation g (0 to hosts() - 1) moves a rank, and where it comes from.
  int32_t moved(int32_t rank, int32_t g) const;
  int32_t moved_back(int32_t rank, int32_t g) const;
  // The permutation that moves host 0 to the host of `rank`.
  int32_t mover_to(int32_t rank) const {
    return kind_ == SymmetryKind::none ? 0 : rank / per_host_;
  }

 private:
  SymmetryKind kind_;
  int32_t ranks_;
  int32_t per_host_;
};

}  // namespace pycoll::simulator
