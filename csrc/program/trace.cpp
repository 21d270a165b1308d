#include "program/trace.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "program/check.h"
#include "program/interpret.h"

namespace pycoll {
namespace {

using namespace prover;

using Vector = std::vector<double>;

double apply(ReduceOp op, double a, double b) {
  const bool has_nan = std::isnan(a) || std::isnan(b);
  switch (op) {
    case ReduceOp::product:
      return a * b;
    case ReduceOp::min:
      return has_nan ? a + b : std::min(a, b);
    case ReduceOp::max:
      return has_nan ? a + b : std::max(a, b);
    default:
      return a + b;
  }
}

bool is_traceable(ReduceOp op) {
  constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min,
                               ReduceOp::max};
  return std::find(std::begin(kOps), std::end(kOps), op) != std::end(kOps);
}

// Where a rank's contribution lies in the vectors that the rows show.
struct Layout {
  const Program& program;
  uint64_t count;  // elements of an input

  const CollectiveTraits& traits() const { return traits_of(program.collective); }
  // The ranks' parts one behind the other.
  bool gathers() const { return traits().input == Parts::one; }
  bool exchanges() const {
    return traits().input == Parts::world && traits().output == Parts::world;
  }
  bool has_input(int32_t rank) const {
    // A broadcast overwrites what the others pass.
    return traits().input != Parts::world || !traits().input_at_root || rank == program.root;
  }
  int32_t chunks() const { return gathers() ? program.world_size : program.input_chunks; }
  // Where `viewer` shows what `rank` contributed as its chunk `chunk`.
  int32_t place_of(int32_t rank, int32_t chunk, int32_t viewer) const {
    if (gathers()) return rank;
    return exchanges() && viewer == chunk ? rank : chunk;
  }
  uint64_t shown() const {
    return gathers() ? count * static_cast<uint64_t>(program.world_size) : count;
  }
  ChunkRange input_range(int32_t chunk) const {
    return chunk_range(count, program.input_chunks, chunk, 1);
  }
  ChunkRange shown_range(int32_t chunk) const { return chunk_range(shown(), chunks(), chunk, 1); }
};

// The interpreter's Domain of numbers. Values are handles into a store that only grows.
class Numbers {
 public:
  using Value = uint32_t;

  struct Event {
    uint32_t time;
    int32_t rank;
    Value value;
  };

  Numbers(const Layout& layout, const std::vector<Vector>& inputs, ReduceOp op)
      : layout_(layout), inputs_(inputs), op_(op) {}

  Value input(int32_t rank, int32_t chunk) {
    const ChunkRange range = layout_.input_range(chunk);
    const Vector& all = inputs_[static_cast<size_t>(rank)];
    return add({rank, chunk,
                Vector(all.begin() + static_cast<std::ptrdiff_t>(range.begin),
                       all.begin() + static_cast<std::ptrdiff_t>(range.end))});
  }

  Value combine(Value left, Value right) {
    Entry result = store_[left];
    const Vector& other = store_[right].elements;
    for (size_t i = 0; i < result.elements.size(); ++i) {
      result.elements[i] = apply(op_, result.elements[i], other[i]);
    }
    return add(std::move(result));
  }

  Value finish(Value value) {
    if (op_ != ReduceOp::avg) return value;
    Entry result = store_[value];
    for (double& element : result.elements) element /= layout_.program.world_size;
    return add(std::move(result));
  }

  void produced(const Production<Value>& p) { events_.push_back({p.time, p.rank, p.value}); }

  void moved(const Move<Value>& move) {
    transfers_.push_back({move.time, move.from, move.to, place_of(move.value, move.to), move.lane,
                          to_string(*move.step)});
  }

  // In the order of time; events of one time as they came, which respects what caused what.
  Trace finish_trace() {
    const auto earlier = [](const auto& a, const auto& b) { return a.time < b.time; };
    std::stable_sort(events_.begin(), events_.end(), earlier);
    std::stable_sort(transfers_.begin(), transfers_.end(), earlier);
    Trace trace;
    trace.rows.push_back({0, initial()});
    for (const Event& event : events_) {
      while (trace.rows.back().time < event.time) {
        TraceRow next = trace.rows.back();
        ++next.time;
        trace.rows.push_back(std::move(next));
      }
      const Vector& elements = store_[event.value].elements;
      const ChunkRange range = layout_.shown_range(place_of(event.value, event.rank));
      Vector& shown = trace.rows.back().values[static_cast<size_t>(event.rank)];
      std::copy(elements.begin(), elements.end(),
                shown.begin() + static_cast<std::ptrdiff_t>(range.begin));
    }
    trace.transfers = std::move(transfers_);
    return trace;
  }

 private:
  struct Entry {
    int32_t rank;  // whose chunk it is; of a sum, one of them
    int32_t chunk;
    Vector elements;
  };

  Value add(Entry entry) {
    store_.push_back(std::move(entry));
    return static_cast<Value>(store_.size() - 1);
  }

  int32_t place_of(Value value, int32_t viewer) const {
    return layout_.place_of(store_[value].rank, store_[value].chunk, viewer);
  }

  std::vector<Vector> initial() const {
    std::vector<Vector> shown(inputs_.size(),
                              Vector(layout_.shown(), std::numeric_limits<double>::quiet_NaN()));
    for (size_t rank = 0; rank < inputs_.size(); ++rank) {
      if (!layout_.has_input(static_cast<int32_t>(rank))) continue;
      const size_t begin = layout_.gathers() ? rank * layout_.count : 0;
      std::copy(inputs_[rank].begin(), inputs_[rank].end(),
                shown[rank].begin() + static_cast<std::ptrdiff_t>(begin));
    }
    return shown;
  }

  const Layout layout_;
  const std::vector<Vector>& inputs_;
  const ReduceOp op_;
  std::vector<Entry> store_;
  std::vector<Event> events_;
  std::vector<Transfer> transfers_;
};

void check_inputs(std::span<const Program> programs, const std::vector<Vector>& inputs) {
  if (inputs.size() != programs.size()) {
    fail(ErrorKind::invalid_argument, inputs.size(), " inputs for ", programs.size(), " ranks");
  }
  const size_t count = inputs.front().size();
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    if (inputs[rank].size() == count) continue;
    fail(ErrorKind::invalid_argument, "rank ", rank, " has ", inputs[rank].size(),
         " elements, rank 0 has ", count);
  }
  const Collective collective = programs.front().collective;
  if (traits_of(collective).input == Parts::world && count % inputs.size() != 0) {
    fail(ErrorKind::invalid_argument, name_of(collective), " of ", count, " elements on ",
         inputs.size(), " ranks: it must be a multiple");
  }
}

}  // namespace

Trace trace(std::span<const Program> programs, const std::vector<Vector>& inputs, ReduceOp op) {
  if (!is_traceable(op)) {
    fail(ErrorKind::invalid_argument, "cannot trace op ", name_of(op),
         "; there are: sum, avg, product, min, max");
  }
  const RunOptions options{.in_place = false, .lengths = {}};
  const CheckResult checked = check(programs, {.in_place = options.in_place});
  if (!checked.ok()) {
    fail(ErrorKind::invalid_argument, "cannot trace wrong Programs: ", name_of(checked.kind), ": ",
         checked.message);
  }
  check_inputs(programs, inputs);
  const Program& first = programs.front();
  const bool empty = first.collective == Collective::barrier;
  const std::vector<Vector> used = empty ? std::vector<Vector>(inputs.size()) : inputs;
  Numbers numbers({first, used.front().size()}, used, op);
  Interpreter<Numbers>(programs, options, numbers).run();
  return numbers.finish_trace();
}

}  // namespace pycoll
