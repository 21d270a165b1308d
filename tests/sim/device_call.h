// One collective call of a group under test: its vectors, how it is launched on every rank, and
// what must come out.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "device_data.h"
#include "device_group.h"
#include "program/algorithm.h"

namespace pycoll::sim::tests {

struct CallShape {
  Collective collective = Collective::all_reduce;
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  Contents contents = Contents::exact;
  // Elements: of the vector; of a block (gather, scatter); or the most that a block of one's own
  // may have (all_gather, reduce_scatter, all_to_all).
  uint64_t count = 0;
  int32_t root = 0;
  bool in_place = false;
  std::vector<int32_t> hosts;  // of each rank, for builders that look at them; empty: one
  size_t offset = 0;           // elements between a multiple of 16 bytes and each vector
  uint64_t seed = 1;

  std::string describe() const;
};

// The vectors of all ranks.
class CallData {
 public:
  CallData(const CallShape& shape, int32_t world_size);

  const CallShape& shape() const { return shape_; }
  cuda::Vector input(int32_t rank) const { return view(rank, true); }
  cuda::Vector output(int32_t rank) const { return view(rank, false); }
  // What a caller may do as soon as the call is over on its stream: reads the outputs, and, for
  // every other call, overwrites the inputs. check() then looks at what was read.
  void launch_use(DeviceGroup& group);
  // New contents in the same memory, for another run of what was launched.
  void renew();
  // Throws if an output is not what it must be, or an input changed that is nobody's output.
  void check(const std::string& what) const;
  // The same of one rank's own.
  void check_rank(int32_t rank, const std::string& what) const;
  // Where a rank's vectors lie, those of a call in place once.
  std::vector<Buffer*> buffers(int32_t rank) const;
  // Throws if anything changed at all.
  void check_untouched(const std::string& what) const;

 private:
  struct Side {
    std::vector<Bytes> blocks;    // contents: of inputs at the start, of outputs at the end
    std::vector<size_t> offsets;  // of each block in the vector
    size_t bytes = 0;
    std::shared_ptr<Buffer> vector;  // nullptr: this rank has none
    size_t at = 0;                   // of the vector in the buffer
    std::shared_ptr<Buffer> seen;    // of an output: what a kernel after the call read there
  };
  bool has(int32_t rank, bool input) const;
  uint64_t block_length(int32_t from, int32_t to) const;
  void make_inputs();
  void make_outputs();
  void place();
  void fill();
  cuda::Vector view(int32_t rank, bool input) const;
  Bytes expected(int32_t rank, int32_t block) const;
  const Side& side(int32_t rank, bool input) const {
    return (input ? inputs_ : outputs_)[static_cast<size_t>(rank)];
  }

  CallShape shape_;
  int32_t world_size_;
  uint64_t generation_ = 0;
  bool overwrites_ = false;
  std::vector<std::shared_ptr<Buffer>> rubbish_;
  std::vector<Side> inputs_;
  std::vector<Side> outputs_;
};

// Launches `data`'s call on every rank by a Program of the registry; what it needs until the group
// has run is kept in `keep`.
using Keep = std::vector<std::shared_ptr<void>>;
void launch_program(DeviceGroup& group, const CallData& data, const std::string& algorithm,
                    Keep& keep, uint32_t sequence);

}  // namespace pycoll::sim::tests
