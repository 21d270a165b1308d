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

// The one pair that may be the same memory.
bool in_place(Collective collective, size_t rank, const Extent& input, const Extent& output) {
  const size_t own_input = collective == Collective::reduce_scatter ? rank : 0;
  const size_t own_output = collective == Collective::all_gather ? rank : 0;
  return input.begin == output.begin && input.index == own_input && output.index == own_output;
}

}  // namespace

void check_overlaps(const CallRequest& request, int rank) {
  const size_t element = size_of(request.dtype);
  std::vector<Extent> outputs = extents_of(request.output, element);
  // std::less: an order for pointers into different objects.
  std::sort(outputs.begin(), outputs.end(),
            [](const Extent& a, const Extent& b) { return std::less<>()(a.begin, b.begin); });
  for (size_t i = 1; i < outputs.size(); ++i) {
    if (std::less<>()(outputs[i].begin, outputs[i - 1].end)) {
      fail(ErrorKind::invalid_argument, name_of(request.collective), " on rank ", rank,
           ": outputs ", outputs[i - 1].index, " and ", outputs[i].index,
           " share memory (overlapping)");
    }
  }
  for (const Extent& input : extents_of(request.input, element)) {
    // Outputs are disjoint, so they are sorted by their ends too: the first that ends behind the
    // input's begin is the first that can share memory with it.
    auto output = std::upper_bound(outputs.begin(), outputs.end(), input.begin,
                                   [](const std::byte* begin, const Extent& extent) {
                                     return std::less<>()(begin, extent.end);
                                   });
    for (; output != outputs.end() && std::less<>()(output->begin, input.end); ++output) {
      if (in_place(request.collective, static_cast<size_t>(rank), input, *output)) continue;
      fail(ErrorKind::invalid_argument, name_of(request.collective), " on rank ", rank, ": input ",
           input.index, " and output ", output->index,
           " share memory (overlapping) other than exactly in place");
    }
  }
}

}  // namespace pycoll
