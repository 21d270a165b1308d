// Which kernel runs a call and how it is cut: pure functions of what all ranks agree on.
#include "kernels/cuda/plan.h"

#include <algorithm>

#include "kernels/cuda/any_op.h"
#include "kernels/cuda/executor_arguments.h"

namespace pycoll::cuda {
namespace {

constexpr uint64_t kLine = 64;
// Shorter slices are not worth a message; longer ones leave channels without work.
constexpr uint64_t kLeastSliceBytes = 8 << 10;
// Where ranks do not know each other's lengths all slices are alike.
constexpr uint64_t kPairwiseSliceBytes = 32 << 10;
// Threads of a block: each has a few packs of a slice.
constexpr uint64_t kBytesPerThread = 32;
constexpr int32_t kLeastThreads = 128;

uint64_t round_up(uint64_t x, uint64_t to) {
  return (x + to - 1) / to * to;
}
uint64_t divide_up(uint64_t x, uint64_t by) {
  return (x + by - 1) / by;
}

// A window is of no use without a barrier.
bool meets(const ProgramHeader& header) {
  return std::any_of(header.lane, header.lane + header.lanes,
                     [](const ProgramLane& lane) { return lane.meets != 0; });
}

// Blocks that meet in windows are numbered alike on all ranks, whatever lanes each of them has.
int32_t most_channels(const Geometry& g, const ProgramHeader& header) {
  if (header.step_by_step != 0) return g.message_fifos;
  const int32_t channels = std::max(1, g.fifos / header.channels);
  return meets(header) ? std::min(channels, g.blocks / kMaxLanes) : channels;
}

// Bytes of scratch that each block of a Program has. Ranks may have different numbers of lanes, and
// must have slices of one length.
uint64_t scratch_stride(const Geometry& g, int32_t channels) {
  const auto blocks = static_cast<uint64_t>(kMaxLanes) * static_cast<uint64_t>(channels);
  return g.scratch_bytes / blocks / kLine * kLine;
}

uint64_t most_slice(const Geometry& g, const ProgramHeader& header, const Elements& e,
                    int32_t channels) {
  const uint64_t widest = std::max(e.size, e.acc_size);
  uint64_t limit = g.slot_bytes / widest;
  if (header.acc_chunks > 0) {
    const auto chunks = static_cast<uint64_t>(header.acc_chunks);
    limit = std::min(limit, scratch_stride(g, channels) / chunks / e.acc_size);
  }
  if (header.window_chunks > 0) {
    const auto chunks = static_cast<uint64_t>(header.window_chunks);
    limit = std::min(limit, g.window_bytes / chunks / e.size);
  }
  return limit / (kLine / e.size) * (kLine / e.size);
}

bool is_sum(ReduceOp op) {
  return op == ReduceOp::sum || op == ReduceOp::avg || op == ReduceOp::premul_sum;
}

uint64_t longest_chunk(const CutVector& vector, int32_t chunks) {
  if (vector.chunk != 0) return std::min(vector.count[0], vector.chunk);
  const uint64_t* end = vector.count + std::min(chunks, kMaxBlocks);
  return chunks == 0 ? 0 : *std::max_element(vector.count, end);
}

}  // namespace

Route route_of(const Arithmetic& a) {
  if (a.op == ReduceOp::none) return Route::move;
  if (is_sum(a.op)) {
    switch (a.dtype) {
      case DType::float32:
      case DType::complex64:  // two of them
        return Route::float32;
      case DType::float16:
        return Route::float16;
      case DType::bfloat16:
        return Route::bfloat16;
      default:
        break;
    }
  }
  return can_reduce(a.dtype, a.op) ? Route::any_op : Route::unsupported;
}

Elements elements_of(const Arithmetic& a) {
  AnyOp op;
  if (!find_any_op(a.dtype, a.op, a.world_size, &op)) {
    return {1, 1, static_cast<uint32_t>(size_of(a.dtype))};
  }
  return {op.value_bytes, op.acc_bytes, op.parts};
}

bool can_reduce(DType dtype, ReduceOp op) {
  AnyOp found;
  return find_any_op(dtype, op, 1, &found);
}

bool has_fast_all_reduce(DType dtype, ReduceOp op) {
  const bool fast = dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
  return fast && is_sum(op);
}

CutVector cut(const Vector& vector, int32_t chunks, const Elements& e) {
  CutVector result{};
  for (int32_t i = 0; i < vector.blocks && i < kMaxBlocks; ++i) {
    result.block[i] = static_cast<std::byte*>(vector.block[i]);
    result.count[i] = vector.count[i] * e.parts;
  }
  // As chunk_range() cuts: chunks begin on cache lines.
  if (vector.blocks <= 1 && chunks > 1) {
    const uint64_t exact = divide_up(result.count[0], static_cast<uint64_t>(chunks));
    result.chunk = std::max(round_up(exact, kLine / e.size), kLine / e.size);
  }
  return result;
}

ProgramCut cut_program(const Geometry& g, const ProgramCall& call) {
  const ProgramHeader& header = call.image->header;
  const Elements e = elements_of(call.arithmetic);
  ProgramCut result;
  // A rank without one of the vectors has the lengths of the other.
  const bool has_input = call.input.blocks > 0, has_output = call.output.blocks > 0;
  result.input = cut(has_input ? call.input : call.output, header.input_chunks, e);
  result.output = cut(has_output ? call.output : call.input, header.output_chunks, e);

  ProgramPlan& plan = result.plan;
  plan.first_fifo = header.step_by_step != 0 ? g.fifos : 0;
  plan.channels = most_channels(g, header);
  const uint64_t line = kLine / e.size;
  const uint64_t most = most_slice(g, header, e, plan.channels);
  const uint64_t longest = std::max(longest_chunk(result.input, header.input_chunks),
                                    longest_chunk(result.output, header.output_chunks));
  if (header.pairwise != 0) {
    plan.slice = std::min(most, kPairwiseSliceBytes / e.size);
  } else {
    const uint64_t even = divide_up(longest, static_cast<uint64_t>(plan.channels));
    const uint64_t least = kLeastSliceBytes / e.size;
    plan.slice = std::min(most, round_up(std::max({even, least, line}), line));
  }
  // 0 where a Geometry has no room for a line: launching is refused.
  plan.rounds = plan.slice == 0 ? 0 : std::max<uint64_t>(1, divide_up(longest, plan.slice));
  if (header.pairwise == 0) {
    plan.channels =
        static_cast<int32_t>(std::min<uint64_t>(static_cast<uint64_t>(plan.channels), plan.rounds));
  }
  result.scratch_stride = scratch_stride(g, most_channels(g, header));
  const uint64_t wanted = divide_up(std::min(plan.slice, longest) * e.size, kBytesPerThread);
  const uint64_t threads = std::max<uint64_t>(round_up(wanted, 32), kLeastThreads);
  plan.threads =
      static_cast<int32_t>(std::min<uint64_t>(threads, static_cast<uint64_t>(g.threads)));
  return result;
}

GridLimits grid_limits(const Geometry& g) {
  return {std::max(g.blocks, kMaxLanes * g.fifos), 2 * (g.world_size - 1) * g.message_fifos};
}

ProgramPlan plan_program(const Geometry& geometry, const ProgramCall& call) {
  return cut_program(geometry, call).plan;
}

}  // namespace pycoll::cuda
