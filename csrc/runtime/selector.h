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
  uint64_t from = 0;  // bytes
  uint64_t to = 0;    // exclusive
};

// Throws Error(invalid_argument) that quotes the part it did not understand and lists what there
// is.
std::vector<SelectionRule> parse_selection(const std::string& text);

struct SelectionInput {
  Collective collective;
  uint64_t bytes = 0;
  bool has_window = false;  // the transport's
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
