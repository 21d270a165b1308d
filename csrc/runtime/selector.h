// Which algorithm runs a call: data, not code.
//
// Three layers of rules are looked at in order: PYCOLL_ALGO, the table that `pycoll tune` measured
// (PYCOLL_TABLE; not for vectors in shareable memory), the built-in one. In a layer the first rule
// that covers the call and whose algorithm can run it (why_unusable) wins; the built-in layer has
// one for every call. All ranks decide from the same inputs and the same rules (bootstrap compares
// them), so they agree.
//
// Grammar of PYCOLL_ALGO:
//   text  := coll { ";" coll }                    all_reduce=...;broadcast=...
//   coll  := NAME "=" rule { "," rule }
//   rule  := ALGORITHM [ ":" FROM "-" TO ]        bytes, FROM <= size < TO; k, M, G; max
// ALGORITHM may be "auto": the next layer decides.
#pragma once

#include <array>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/config.h"
#include "program/algorithm.h"

namespace pycoll {

struct SelectionRule {
  static constexpr uint64_t kMaxBytes = std::numeric_limits<uint64_t>::max();
  static constexpr int32_t kMaxRanks = std::numeric_limits<int32_t>::max();

  Collective collective;
  std::string algorithm;
  uint64_t from = 0;        // bytes
  uint64_t to = kMaxBytes;  // exclusive, but for kMaxBytes
  int32_t least_ranks = 1;  // of the group
  int32_t most_ranks = kMaxRanks;
  std::string transport{};              // Transport::name(); empty: any
  std::optional<bool> several_hosts{};  // whether the ranks are on several; empty: either
};

// Throws Error(invalid_argument) that quotes the part it did not understand and lists what there
// is; also for a rule that covers no size and for a collective that is named twice.
std::vector<SelectionRule> parse_selection(const std::string& text);

// One word that is equal for equal tables, and else not; for ranks to compare.
std::string fingerprint_of(const std::vector<SelectionRule>& table);

// All ranks must come to the same choice: only what they agree on.
struct SelectionInput {
  Collective collective;
  uint64_t bytes = 0;  // of the whole vector; all_to_all: 0, only pairs of ranks know its lengths
  int32_t ranks = 1;
  std::string_view transport{};
  bool has_window = false;     // the transport's
  bool several_hosts = false;  // ranks of the group are on several
  uint64_t fifo_depth = 2;
  bool leases = false;  // vectors may be shareable; with one that is not, there are none
};

// Empty when the algorithm can run there, else the reason.
std::string why_unusable(const Algorithm& algorithm, const SelectionInput& input);

struct SelectorSettings {
  std::string algo;                  // PYCOLL_ALGO
  std::vector<SelectionRule> table;  // PYCOLL_TABLE's
  Determinism determinism = Determinism::run;
  int32_t ranks = 1;
};

class Selector {
 public:
  // Throws what parse_selection() throws; Error(invalid_argument) for a rule of the table whose
  // algorithm does not exist, and for one of PYCOLL_ALGO that breaks the promise of `determinism`.
  // Rules of the table that break it are passed over: other groups may use them.
  explicit Selector(const SelectorSettings& settings);

  const Algorithm& select(const SelectionInput& input) const;
  // Empty when a call may ask for this algorithm: why_unusable(), and what `determinism` promises.
  std::string why_not(const Algorithm& algorithm, const SelectionInput& input) const;

 private:
  enum class Layer : uint8_t { environment, table, builtin };
  struct Row {
    SelectionRule rule;
    const Algorithm* algorithm;  // nullptr: "auto"
    Layer layer;
  };

  const Algorithm& first_that_can(const SelectionInput& input) const;
  void add(Layer layer, SelectionRule rule);
  void add_builtin(bool leases, int32_t ranks);
  bool breaks_promise(const Algorithm& algorithm) const {
    return determinism_ == Determinism::algorithm && unordered_.contains(&algorithm);
  }

  std::array<std::vector<Row>, static_cast<size_t>(Collective::kCount)> rows_;
  const Determinism determinism_;
  // Those that do not combine in the order of ranks. Empty where only built-in rules decide, which
  // name none of them beside one that needs leases.
  std::set<const Algorithm*> unordered_;
};

}  // namespace pycoll
