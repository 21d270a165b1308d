// Which algorithm runs a call: data, not code.
//
// Rules are looked at in order; the first that covers the size wins. Rules from PYCOLL_ALGO come
// before the built-in ones. All ranks decide from the same inputs, so they agree.
//
// Grammar of PYCOLL_ALGO:
//   text  := coll { ";" coll }                    all_reduce=...;broadcast=...
//   coll  := NAME "=" rule { "," rule }
//   rule  := ALGORITHM [ ":" FROM "-" TO ]        bytes, FROM <= size < TO; k, M, G; max
#pragma once

#include <string>
#include <vector>

#include "program/algorithm.h"

namespace pycoll {

struct SelectionRule {
  Collective collective;
  std::string algorithm;
  uint64_t from = 0;           // bytes
  uint64_t to = 0;             // exclusive
  bool several_hosts = false;  // only where the ranks are on several
};

// Throws Error(invalid_argument) that quotes the part it did not understand and lists what there
// is; also for a rule that covers no size and for a collective that is named twice.
std::vector<SelectionRule> parse_selection(const std::string& text);

// All ranks must come to the same choice: only what they agree on.
struct SelectionInput {
  Collective collective;
  uint64_t bytes = 0;  // of the whole vector; all_to_all: 0, only pairs of ranks know its lengths
  bool has_window = false;     // the transport's
  bool several_hosts = false;  // ranks of the group are on several
};

class Selector {
 public:
  explicit Selector(const std::string& environment);
  // The row to use. A rule whose algorithm cannot run here (can_use) is passed over.
  const Algorithm& select(const SelectionInput& input) const;

 private:
  std::vector<SelectionRule> rules_;
};

// Empty when the algorithm can run there, else the reason.
std::string why_unusable(const Algorithm& algorithm, const SelectionInput& input);

}  // namespace pycoll
