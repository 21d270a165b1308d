#include "runtime/overlap.h"

#include <algorithm>
#include <functional>

#include "core/error.h"

namespace pycoll {
namespace {

struct Block {
  const std::byte* begin;
  const std::byte* end;
  size_t index;
};

std::vector<Block> blocks_of(const VectorView& view, size_t bytes) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < view.blocks.size(); ++i) {
    blocks.push_back({view.blocks[i], view.blocks[i] + bytes, i});
  }
  return blocks;
}

// The one pair that may be the same memory.
bool in_place(Collective collective, size_t rank, const Block& input, const Block& output) {
  const size_t own_input = collective == Collective::reduce_scatter ? rank : 0;
  const size_t own_output = collective == Collective::all_gather ? rank : 0;
  return input.begin == output.begin && input.index == own_input && output.index == own_output;
}

}  // namespace

void check_overlaps(const CallRequest& request, int rank) {
  const size_t bytes = request.count * size_of(request.dtype);
  if (bytes == 0 || request.output.blocks.empty()) return;
  std::vector<Block> outputs = blocks_of(request.output, bytes);
  // std::less: an order for pointers into different objects.
  std::sort(outputs.begin(), outputs.end(),
            [](const Block& a, const Block& b) { return std::less<>()(a.begin, b.begin); });
  for (size_t i = 1; i < outputs.size(); ++i) {
    if (std::less<>()(outputs[i].begin, outputs[i - 1].end)) {
      fail(ErrorKind::invalid_argument, name_of(request.collective), " on rank ", rank,
           ": outputs ", outputs[i - 1].index, " and ", outputs[i].index,
           " share memory (overlapping)");
    }
  }
  for (const Block& input : blocks_of(request.input, bytes)) {
    // All outputs have one length, so the first that ends behind the input's begin is the first
    // that can share memory with it.
    auto output = std::upper_bound(
        outputs.begin(), outputs.end(), input.begin,
        [](const std::byte* begin, const Block& block) { return std::less<>()(begin, block.end); });
    for (; output != outputs.end() && std::less<>()(output->begin, input.end); ++output) {
      if (in_place(request.collective, static_cast<size_t>(rank), input, *output)) continue;
      fail(ErrorKind::invalid_argument, name_of(request.collective), " on rank ", rank, ": input ",
           input.index, " and output ", output->index,
           " share memory (overlapping) other than exactly in place");
    }
  }
}

}  // namespace pycoll
