// One call of a collective with known data, and the check of its result element by element.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "program/algorithm.h"
#include "random.h"
#include "runtime/operation.h"

namespace pycoll::stress {

struct Case {
  const Algorithm* algorithm = nullptr;
  DType dtype = DType::int32;
  ReduceOp op = ReduceOp::none;
  uint64_t count = 0;  // elements of a block, at most
  int root = 0;
  bool in_place = false;
  uint64_t salt = 0;    // makes the data of this call differ from that of the last
  bool uneven = false;  // blocks differ in length, where they may
};

std::string to_string(const Case& what);

// Draws size, dtype, operation, root and placement; the same from equal generators.
Case draw_case(const Algorithm& algorithm, int world_size, Rng& agreed);

// A rank's vectors for one case. They stand in heap blocks of exactly their size, so that
// AddressSanitizer sees the first byte too far; those of an algorithm that needs leases are lent
// from the arena, whose next user ThreadSanitizer compares with a peer that is late.
class Vectors {
 public:
  Vectors(const Case& what, int rank, int world_size);
  // Views of these vectors, which must outlive the operation.
  CallRequest request();
  // Throws CheckFailed that names rank, case, block and element.
  void check_result() const;

 private:
  using Memory = std::vector<std::byte>;

  const CollectiveTraits& traits() const { return traits_of(case_.algorithm->collective); }
  bool is_root() const { return case_.root == rank_; }
  // Elements of the block that goes from one rank to another; where it is the same for all senders
  // or all receivers, that one does not matter.
  uint64_t length(size_t from, size_t to) const;
  uint64_t input_length(size_t block) const;
  uint64_t output_length(size_t block) const;
  void fill_input();
  void share_memory();
  void move_to_arena();
  void take_from_arena();
  void check_values() const;
  VectorView view(std::vector<Memory>& blocks, size_t begin) const;
  int64_t expected(size_t block, uint64_t i) const;
  int64_t contribution(int rank, size_t block, uint64_t i) const;
  void check_block(size_t block) const;

  Case case_;
  int rank_;
  int world_size_;
  std::vector<Memory> input_;
  std::vector<Memory> output_;
  std::shared_ptr<std::byte> arena_block_;  // all blocks, one behind the other; or nullptr
};

}  // namespace pycoll::stress
