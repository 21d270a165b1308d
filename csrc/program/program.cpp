#include "program/program.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace pycoll {
namespace {

// In the order of Collective.
constexpr std::array<CollectiveTraits, static_cast<size_t>(Collective::kCount)> kCollectives{{
    // name, input, output, lengths, reduces, rooted, input_at_root, output_at_root
    {"all_reduce", Parts::alike, Parts::alike, Lengths::cut, true, false, false, false},
    {"all_gather", Parts::one, Parts::world, Lengths::known, false, false, false, false},
    {"reduce_scatter", Parts::world, Parts::one, Lengths::known, true, false, false, false},
    {"broadcast", Parts::alike, Parts::alike, Lengths::cut, false, true, true, false},
    {"barrier", Parts::alike, Parts::alike, Lengths::cut, false, false, false, false},
    {"reduce", Parts::alike, Parts::alike, Lengths::cut, true, true, false, true},
    {"gather", Parts::one, Parts::world, Lengths::equal, false, true, false, true},
    {"scatter", Parts::world, Parts::one, Lengths::equal, false, true, true, false},
    {"all_to_all", Parts::world, Parts::world, Lengths::pairwise, false, false, false, false},
}};
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
    {"recv_send", true, false, false, false, true, false},
    {"recv_reduce", true, true, true, true, false, false},
    {"recv_reduce_send", true, true, true, false, true, false},
    {"recv_reduce_copy_send", true, true, true, true, true, false},
    {"copy", false, false, true, true, false, false},
    {"reduce_from", false, false, true, true, false, true},
    {"copy_from", false, false, false, true, false, true},
    {"reduce_to", false, false, true, true, false, true},
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
  const std::string remote = to_string(Ref{step.remote, step.remote_chunk});
  if (step.kind == StepKind::copy_from) return text + concat(remote, " of ", step.from);
  if (traits.direct) {
    return text +
           concat("sum of ", remote, " over group ", step.group, " with own ", to_string(step.src));
  }
  if (traits.reduces && step.received_first) text += "received + ";
  if (traits.reads) text += to_string(step.src);
  if (traits.reduces && !step.received_first) text += " + received";
  return text;
}

}  // namespace

const CollectiveTraits& traits_of(Collective collective) {
  return kCollectives[static_cast<size_t>(collective)];
}

std::string_view name_of(Collective collective) {
  const size_t index = static_cast<size_t>(collective);
  return index < kCollectives.size() ? kCollectives[index].name : "?";
}

std::optional<Collective> collective_from_name(std::string_view name) {
  const auto found = std::find_if(kCollectives.begin(), kCollectives.end(),
                                  [&](const CollectiveTraits& row) { return row.name == name; });
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

int32_t output_in_place(const Program& program, int32_t input_chunk) {
  const CollectiveTraits& traits = traits_of(program.collective);
  const bool root = program.rank == program.root;
  if (program.collective == Collective::barrier) return -1;  // no elements, no memory
  if ((traits.input_at_root || traits.output_at_root) && !root) {
    return traits.input == Parts::alike && !traits.output_at_root ? input_chunk : -1;
  }
  if (traits.input == Parts::alike) return input_chunk;
  if (traits.input == Parts::one) return program.rank;
  return traits.output == Parts::one && input_chunk == program.rank ? 0 : -1;
}

int32_t length_classes(const Program& program) {
  switch (traits_of(program.collective).lengths) {
    case Lengths::cut:
      return program.input_chunks;
    case Lengths::equal:
      return 1;
    case Lengths::known:
      return program.world_size;
    case Lengths::pairwise:
      break;
  }
  return program.world_size * program.world_size;
}

namespace {

int32_t length_class_at(const Program& program, Ref ref, int32_t rank) {
  const CollectiveTraits& traits = traits_of(program.collective);
  if (traits.lengths == Lengths::equal) return 0;
  if (traits.lengths == Lengths::pairwise) {
    // Of a block from one rank to another.
    const int32_t w = program.world_size;
    return ref.space == Space::output ? ref.chunk * w + rank : rank * w + ref.chunk;
  }
  const bool own = (ref.space == Space::input && traits.input == Parts::one) ||
                   (ref.space == Space::output && traits.output == Parts::one);
  return own ? rank : ref.chunk;
}

}  // namespace

int32_t length_class(const Program& program, Ref ref) {
  return length_class_at(program, ref, program.rank);
}

int32_t remote_length_class(const Program& program, const Step& step, int32_t peer) {
  return length_class_at(program, {step.remote, step.remote_chunk}, peer);
}

int32_t length_class(const Program& program, const Step& step) {
  const StepTraits& traits = traits_of(step.kind);
  const auto in_vectors = [](bool used, Ref ref) {
    return used && (ref.space == Space::input || ref.space == Space::output);
  };
  if (in_vectors(traits.reads, step.src)) return length_class(program, step.src);
  if (in_vectors(traits.stores, step.dst)) return length_class(program, step.dst);
  return length_class(program, traits.reads ? step.src : step.dst);
}

std::string to_string(Ref ref) {
  return concat(name_of(ref.space), "[", ref.chunk, "]");
}

std::string to_string(const Step& step) {
  const StepTraits& traits = traits_of(step.kind);
  if (step.kind == StepKind::barrier) return concat("barrier of group ", step.group);
  const std::string operands = operands_of(step, traits);
  std::string text = concat(traits.name, operands.empty() ? "" : " ", operands);
  if (step.kind == StepKind::reduce_to) {
    text += step.to < 0 ? ", to all of them" : concat(", to ", step.to);
  }
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
