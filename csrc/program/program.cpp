#include "program/program.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace pycoll {
namespace {

constexpr std::array<std::string_view, static_cast<size_t>(Collective::kCount)> kCollectives{
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier",
    "reduce",     "gather",     "scatter",        "all_to_all"};
constexpr std::array<std::string_view, 5> kSpaces{"none", "input", "output", "acc", "window"};
constexpr std::array<std::string_view, 2> kWires{"value", "partial"};
constexpr std::array<std::string_view, 4> kOrders{"none", "rank_order", "ring_order",
                                                  "lower_first"};

// In the order of StepKind.
constexpr std::array<StepTraits, static_cast<size_t>(StepKind::kCount)> kTraits{{
    // name, receives, reduces, reads, stores, sends, direct
    {"send", false, false, true, false, true, false},
    {"recv", true, false, false, true, false, false},
    {"recv_copy_send", true, false, false, true, true, false},
    {"recv_reduce", true, true, true, true, false, false},
    {"recv_reduce_send", true, true, true, false, true, false},
    {"recv_reduce_copy_send", true, true, true, true, true, false},
    {"copy", false, false, true, true, false, false},
    {"reduce_from", false, false, true, true, false, true},
    {"copy_from", false, false, false, true, false, true},
    {"barrier", false, false, false, false, false, true},
}};

template <typename Names, typename Enum>
std::string_view name_in(const Names& names, Enum value) {
  const size_t index = static_cast<size_t>(value);
  return index < names.size() ? names[index] : "?";
}

// What a step computes or moves, without its route: "acc[0] = received + input[0]".
std::string operands_of(const Step& step, const StepTraits& traits) {
  std::string text;
  if (traits.stores) text += to_string(step.dst);
  if (step.kind == StepKind::recv || step.kind == StepKind::recv_copy_send) return text;
  if (traits.stores) text += " = ";
  if (step.kind == StepKind::copy_from) {
    return text + concat("window[", step.remote_chunk, "] of ", step.from);
  }
  if (step.kind == StepKind::reduce_from) {
    return text + concat("sum of window[", step.remote_chunk, "] over group ", step.group,
                         " with own ", to_string(step.src));
  }
  if (traits.reduces && step.received_first) text += "received + ";
  if (traits.reads) text += to_string(step.src);
  if (traits.reduces && !step.received_first) text += " + received";
  return text;
}

}  // namespace

std::string_view name_of(Collective collective) {
  return name_in(kCollectives, collective);
}

std::optional<Collective> collective_from_name(std::string_view name) {
  const auto found = std::find(kCollectives.begin(), kCollectives.end(), name);
  if (found == kCollectives.end()) return std::nullopt;
  return static_cast<Collective>(found - kCollectives.begin());
}

std::string_view name_of(Space space) {
  return name_in(kSpaces, space);
}

std::string_view name_of(Wire wire) {
  return name_in(kWires, wire);
}

std::string_view name_of(Order order) {
  return name_in(kOrders, order);
}

const StepTraits& traits_of(StepKind kind) {
  return kTraits[static_cast<size_t>(kind)];
}

ChunkRange chunk_range(uint64_t count, int32_t chunks, int32_t chunk, uint64_t align) {
  const uint64_t parts = static_cast<uint64_t>(chunks);
  const uint64_t exact = count / parts + (count % parts != 0 ? 1 : 0);
  const uint64_t size = (exact + align - 1) / align * align;
  const uint64_t begin = std::min(count, size * static_cast<uint64_t>(chunk));
  return {begin, std::min(count, begin + size)};
}

std::string to_string(Ref ref) {
  return concat(name_of(ref.space), "[", ref.chunk, "]");
}

std::string to_string(const Step& step) {
  const StepTraits& traits = traits_of(step.kind);
  if (step.kind == StepKind::barrier) return concat("barrier of group ", step.group);
  std::string text = concat(traits.name, " ", operands_of(step, traits));
  if (traits.receives && traits.sends) {
    text += concat(", ", step.from, " -> ", step.to);
  } else if (traits.receives) {
    text += concat(", from ", step.from);
  } else if (traits.sends) {
    text += concat(", to ", step.to);
  }
  if ((traits.receives || traits.sends) && step.channel != 0) {
    text += concat(", channel ", step.channel);
  }
  return text;
}

std::string describe_step(const Program& program, size_t lane, size_t step) {
  return concat("rank ", program.rank, ", lane ", lane, ", step ", step, " (",
                to_string(program.lanes[lane].steps[step]), ")");
}

}  // namespace pycoll
