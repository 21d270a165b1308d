#include "runtime/overlap.h"

#include <algorithm>
#include <functional>

#include "core/error.h"

namespace pycoll {
namespace {

// The memory of a block that is not empty.
struct Extent {
  const std::byte* begin;
  const std::byte* end;
  size_t index;
};

std::vector<Extent> extents_of(const VectorView& view, size_t element) {
  std::vector<Extent> extents;
  for (size_t i = 0; i < view.blocks.size(); ++i) {
    const Block& block = view.blocks[i];
    if (block.count == 0) continue;
    extents.push_back({block.data, block.data + block.count * element, i});
  }
  return extents;
}

// The extents of a call's output, which are disjoint, in order. std::less: an order for pointers
// into different objects.
std::vector<Extent> sorted_extents_of(const VectorView& view, size_t element) {
  std::vector<Extent> extents = extents_of(view, element);
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::less<>()(a.begin, b.begin); });
  return extents;
}

// Of disjoint extents in order, those that share memory with one of another vector. They are in the
// order of their ends too: the first that ends behind that one's begin is the first that can.
template <typename Function>
bool any_meeting(const std::vector<Extent>& sorted, const Extent& one, const Function& applies) {
  auto it = std::upper_bound(sorted.begin(), sorted.end(), one.begin,
                             [](const std::byte* begin, const Extent& extent) {
                               return std::less<>()(begin, extent.end);
                             });
  for (; it != sorted.end() && std::less<>()(it->begin, one.end); ++it) {
    if (applies(*it)) return true;
  }
  return false;
}

bool meet(const std::vector<Extent>& sorted, const std::vector<Extent>& others) {
  return std::any_of(others.begin(), others.end(), [&](const Extent& one) {
    return any_meeting(sorted, one, [](const Extent&) { return true; });
  });
}

// The one pair that may be the same memory: of a vector of one block, that block, of one with a
// block a rank, this rank's.
bool in_place(Collective collective, size_t rank, const Extent& input, const Extent& output) {
  const CollectiveTraits& traits = traits_of(collective);
  if (traits.input == Parts::world && traits.output == Parts::world) return false;
  const auto own = [&](Parts parts) { return parts == Parts::world ? rank : 0; };
  return input.begin == output.begin && input.index == own(traits.input) &&
         output.index == own(traits.output);
}

// The blocks of one vector of a call.
struct Vector {
  const char* name;
  const VectorView& view;
  Parts parts;
  bool at_root;  // only the root has it
};

class ShapeChecker {
 public:
  ShapeChecker(const CallRequest& request, int rank, int world_size)
      : request_(request),
        traits_(traits_of(request.collective)),
        rank_(static_cast<size_t>(rank)),
        world_size_(static_cast<size_t>(world_size)) {}

  void run() const {
    const Vector input{"input", request_.input, traits_.input, traits_.input_at_root};
    const Vector output{"output", request_.output, traits_.output, traits_.output_at_root};
    const bool has_input = count_blocks(input);
    const bool has_output = count_blocks(output);
    if (traits_.lengths == Lengths::equal) {
      equal_blocks(input);
      equal_blocks(output);
    }
    if (!has_input || !has_output) return;
    const Block& in = own_block(input);
    const Block& out = own_block(output);
    if (in.count == out.count) return;
    refuse("its block of the input has ", in.count, " elements, of the output ", out.count);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    fail(ErrorKind::invalid_argument, name_of(request_.collective), " on rank ", rank_, ": ",
         parts...);
  }

  // False: this rank has no such vector, or a barrier none at all.
  bool count_blocks(const Vector& vector) const {
    const size_t blocks = vector.view.blocks.size();
    const bool elsewhere = vector.at_root && rank_ != static_cast<size_t>(request_.root);
    // Every rank of a broadcast has a buffer, which may be given as its input too.
    if (blocks == 0 && (elsewhere || request_.collective == Collective::barrier)) return false;
    const size_t wanted = vector.parts == Parts::world ? world_size_ : 1;
    const bool may_pass = !elsewhere || request_.collective == Collective::broadcast;
    if (blocks == wanted && may_pass) return true;
    refuse(vector.name, " has ", blocks, " blocks, not ", may_pass ? wanted : 0);
  }

  void equal_blocks(const Vector& vector) const {
    for (const Block& block : vector.view.blocks) {
      if (block.count == vector.view.blocks.front().count) continue;
      refuse(vector.name, " has blocks of ", vector.view.blocks.front().count, " and ", block.count,
             " elements: they must be equal");
    }
  }

  const Block& own_block(const Vector& vector) const {
    return vector.view.blocks[vector.parts == Parts::world ? rank_ : 0];
  }

  const CallRequest& request_;
  const CollectiveTraits& traits_;
  size_t rank_;
  size_t world_size_;
};

}  // namespace

void check_shapes(const CallRequest& request, int rank, int world_size) {
  ShapeChecker(request, rank, world_size).run();
}

void check_overlaps(const CallRequest& request, int rank) {
  const size_t element = size_of(request.dtype);
  const std::vector<Extent> outputs = sorted_extents_of(request.output, element);
  for (size_t i = 1; i < outputs.size(); ++i) {
    if (std::less<>()(outputs[i].begin, outputs[i - 1].end)) {
      fail(ErrorKind::invalid_argument, name_of(request.collective), " on rank ", rank,
           ": outputs ", outputs[i - 1].index, " and ", outputs[i].index,
           " share memory (overlapping)");
    }
  }
  for (const Extent& input : extents_of(request.input, element)) {
    any_meeting(outputs, input, [&](const Extent& output) {
      if (in_place(request.collective, static_cast<size_t>(rank), input, output)) return false;
      fail(ErrorKind::invalid_argument, name_of(request.collective), " on rank ", rank, ": input ",
           input.index, " and output ", output.index,
           " share memory (overlapping) other than exactly in place");
    });
  }
}

bool in_conflict(const Touched& one, const Touched& other) {
  const std::vector<Extent> written = sorted_extents_of(one.output, one.element);
  const std::vector<Extent> also_written = sorted_extents_of(other.output, other.element);
  return meet(written, also_written) || meet(written, extents_of(other.input, other.element)) ||
         meet(also_written, extents_of(one.input, one.element));
}

}  // namespace pycoll
