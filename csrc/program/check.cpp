#include "program/check.h"

#include <array>
#include <random>
#include <unordered_set>

#include "core/error.h"
#include "program/expression.h"
#include "program/interpret.h"

namespace pycoll {
namespace {

using namespace prover;

constexpr std::array<std::string_view, 8> kKinds{
    "ok", "invalid", "deadlock", "wrong_result", "wrong_order", "race", "leftover", "mismatch"};

// The interpreter's Domain of symbols.
class Symbols {
 public:
  using Value = Expressions::Id;

  Value input(int32_t rank, int32_t chunk) { return expressions.leaf(rank, chunk); }
  Value combine(Value left, Value right) { return expressions.sum(left, right); }
  Value finish(Value value) { return value; }
  void produced(const Production<Value>&) {}
  void moved(const Move<Value>&) {}

  Expressions expressions;
};

// All Programs are of the same thing, one a rank, each valid on its own.
void check_headers(std::span<const Program> programs) {
  if (programs.empty()) throw Fault{CheckKind::invalid, "there are no Programs"};
  const Program& first = programs.front();
  for (size_t i = 0; i < programs.size(); ++i) {
    const Program& program = programs[i];
    const auto require = [&](bool good, std::string_view what) {
      if (good) return;
      throw Fault{CheckKind::invalid, concat("rank ", program.rank, " (Program ", i, " of ",
                                             programs.size(), "): ", what)};
    };
    require(static_cast<size_t>(program.world_size) == programs.size(),
            "world_size is not the number of Programs");
    require(static_cast<size_t>(program.rank) == i, "its rank is not its place");
    require(program.collective == first.collective, "another collective than rank 0's");
    require(program.root == first.root, "another root than rank 0's");
    require(program.order == first.order, "promises another order than rank 0's");
    require(program.ring == first.ring, "another ring than rank 0's");
    require(program.channels == first.channels, "another number of channels than rank 0's");
    require(
        program.input_chunks == first.input_chunks && program.output_chunks == first.output_chunks,
        "cut into other chunks than rank 0's");
    require(program.window_chunks == first.window_chunks, "another window than rank 0's");
    require(!program.uses_window() || program.lanes.size() == first.lanes.size(),
            "another number of lanes than rank 0's, and it uses the window");
    require(program.needs_lease == first.needs_lease,
            "needs a lease where rank 0 needs none, or none");
    require(program.collective != Collective::barrier || !program.lanes.empty(),
            "a barrier without lanes waits for nobody");
    try {
      validate(program);
    } catch (const Error& error) {
      throw Fault{CheckKind::invalid, error.what()};
    }
  }
}

// Compares what the outputs hold after a run with what the collective promises.
class Verifier {
 public:
  Verifier(std::span<const Program> programs, Interpreter<Symbols>& run, Symbols& symbols)
      : programs_(programs), run_(run), symbols_(symbols) {}

  void verify() {
    const Program& first = programs_.front();
    const CollectiveTraits& traits = traits_of(first.collective);
    if (first.collective == Collective::barrier) return;
    for (int32_t chunk = 0; chunk < first.output_chunks; ++chunk) {
      for (const Program& program : programs_) {
        if (traits.output_at_root && program.rank != program.root) continue;
        const int32_t rounds =
            run_.rounds().of_length(length_class(program, Ref{Space::output, chunk}));
        for (int32_t round = 0; round < rounds; ++round) one(program, round, chunk);
      }
    }
  }

 private:
  void one(const Program& program, int32_t round, int32_t chunk) {
    const Cell<Expressions::Id>& cell = run_.output(program.rank, round, chunk);
    if (cell.round < 0) {
      throw Fault{CheckKind::wrong_result, concat("rank ", program.rank, ": no step writes output[",
                                                  chunk, "] in round ", round)};
    }
    if (reduces(program.collective)) {
      sum(program, cell, chunk);
    } else {
      moved(program, cell, chunk);
    }
  }

  // Which input chunk an output chunk is made from, and of which rank where nothing is reduced.
  struct Origin {
    int32_t rank;
    int32_t input_chunk;
  };
  static Origin origin(const Program& program, int32_t chunk) {
    const CollectiveTraits& traits = traits_of(program.collective);
    const int32_t rank = traits.output == Parts::world ? chunk : program.root;
    if (traits.input == Parts::alike) return {rank, chunk};
    return {rank, traits.input == Parts::one ? 0 : program.rank};
  }

  void sum(const Program& program, const Cell<Expressions::Id>& cell, int32_t chunk) {
    const int32_t input_chunk = origin(program, chunk).input_chunk;
    const Expressions::Id id = cell.datum.value;
    if (program.world_size > 1 && cell.datum.form != Form::finished) {
      fault(CheckKind::wrong_result, cell, chunk, "it was never finished");
    }
    // A proved sum of another chunk is no proof for this one.
    if (!proved_.contains(id) || symbols_.expressions.chunk_of(id) != input_chunk) {
      if (const auto why = symbols_.expressions.not_complete(id, input_chunk, program.world_size)) {
        fault(CheckKind::wrong_result, cell, chunk, *why);
      }
      if (program.world_size > 1) {
        const auto why = symbols_.expressions.not_in_order(id, program.order, program.ring);
        if (why) fault(CheckKind::wrong_order, cell, chunk, *why);
      }
      proved_.insert(id);
    }
    // The same tree everywhere means the same bits everywhere.
    if (same_.size() <= static_cast<size_t>(input_chunk)) {
      same_.resize(static_cast<size_t>(input_chunk) + 1, kUnknown);
    }
    Expressions::Id& same = same_[static_cast<size_t>(input_chunk)];
    if (same == kUnknown) same = id;
    if (same != id) {
      fault(CheckKind::wrong_order, cell, chunk,
            "rank 0 combines it as " + symbols_.expressions.to_string(same));
    }
  }

  void moved(const Program& program, const Cell<Expressions::Id>& cell, int32_t chunk) {
    const auto [owner, input_chunk] = origin(program, chunk);
    if (cell.datum.value == symbols_.input(owner, input_chunk)) return;
    fault(CheckKind::wrong_result, cell, chunk,
          concat("it must be chunk ", input_chunk, " of rank ", owner));
  }

  [[noreturn]] void fault(CheckKind kind, const Cell<Expressions::Id>& cell, int32_t chunk,
                          const std::string& why) const {
    throw Fault{kind, concat(run_.wiring().describe(cell.process, cell.step), ": output[", chunk,
                             "] is ", symbols_.expressions.to_string(cell.datum.value), ": ", why)};
  }

  static constexpr Expressions::Id kUnknown = 0xFFFFFFFFu;

  std::span<const Program> programs_;
  Interpreter<Symbols>& run_;
  Symbols& symbols_;
  std::unordered_set<Expressions::Id> proved_;
  std::vector<Expressions::Id> same_;  // of each input chunk, the tree that the first rank used
};

void prove(std::span<const Program> programs, const RunOptions& options, Symbols& symbols) {
  Interpreter<Symbols> run(programs, options, symbols);
  run.run();
  Verifier(programs, run, symbols).verify();
}

// As chunks of a real vector: the last ones are shorter than the first.
std::vector<int32_t> shrinking_lengths(int32_t chunks, int32_t rounds) {
  std::vector<int32_t> lengths(static_cast<size_t>(chunks), rounds);
  const int32_t middle = chunks / 2;
  for (int32_t chunk = middle; chunk < chunks; ++chunk) {
    lengths[static_cast<size_t>(chunk)] = chunk == middle ? (rounds + 1) / 2 : 1;
  }
  return lengths;
}

std::vector<int32_t> random_lengths(int32_t classes, int32_t rounds, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> lengths(static_cast<size_t>(classes));
  for (int32_t& length : lengths) {
    length = static_cast<int32_t>(random() % static_cast<uint64_t>(rounds + 1));
  }
  lengths[random() % lengths.size()] = rounds;
  return lengths;
}

// The lengths to prove the Programs for, beside equal ones.
std::vector<std::vector<int32_t>> other_lengths(const Program& program,
                                                const CheckOptions& options) {
  const int32_t classes = length_classes(program);
  switch (traits_of(program.collective).lengths) {
    case Lengths::equal:
      return {};
    case Lengths::cut:
      if (classes == 1 || options.rounds == 1) return {};
      return {shrinking_lengths(classes, options.rounds)};
    case Lengths::known:
    case Lengths::pairwise:
      break;
  }
  std::vector<std::vector<int32_t>> all;
  for (int32_t draw = 0; draw < options.draws; ++draw) {
    const uint64_t seed = options.seed * 1000 + static_cast<uint64_t>(draw);
    all.push_back(random_lengths(classes, options.rounds, seed));
  }
  return all;
}

}  // namespace

std::string_view name_of(CheckKind kind) {
  return kKinds[static_cast<size_t>(kind)];
}

CheckResult check(std::span<const Program> programs, const CheckOptions& options) {
  if (options.depth < 1 || options.rounds < 1) {
    fail(ErrorKind::invalid_argument, "depth and rounds must be at least 1, not ", options.depth,
         " and ", options.rounds);
  }
  RunOptions run{options.depth, options.rounds, options.in_place, {}};
  Symbols symbols;
  try {
    check_headers(programs);
    prove(programs, run, symbols);
    for (auto& lengths : other_lengths(programs.front(), options)) {
      run.lengths = std::move(lengths);
      prove(programs, run, symbols);
    }
  } catch (const Fault& fault) {
    return {fault.kind, fault.message};
  }
  return {};
}

}  // namespace pycoll
