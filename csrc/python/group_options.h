// What a caller of either module may set for one group, as plain Python data.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/config.h"
#include "core/error.h"
#include "runtime/selector.h"

namespace pycoll {

// PYCOLL_* variables by name; they come before the environment's.
using Variables = std::map<std::string, std::string>;

inline void apply_variables(const Variables& variables, Config& config) {
  for (const auto& [name, value] : variables) {
    bool known = false;
    for (const ConfigVariable& variable : config_variables()) {
      if (variable.name != name) continue;
      variable.parse(config, value);
      known = true;
    }
    if (!known) fail(ErrorKind::invalid_argument, "'", name, "' is no variable of pycoll");
  }
}

// Collective, algorithm, from, to (bytes), least and most ranks, transport, several hosts: the
// fields of a SelectionRule. pycoll/selection.py has checked them, and says where a file is wrong.
using TableRow = std::tuple<std::string, std::string, uint64_t, uint64_t, int32_t, int32_t,
                            std::string, std::optional<bool>>;

inline std::vector<SelectionRule> rules_of(const std::vector<TableRow>& table) {
  std::vector<SelectionRule> rules;
  for (const auto& [name, algorithm, from, to, least, most, transport, several] : table) {
    const std::optional<Collective> collective = collective_from_name(name);
    if (!collective) {
      fail(ErrorKind::invalid_argument, "the selection table names '", name,
           "', which is no collective");
    }
    rules.push_back({*collective, algorithm, from, to, least, most, transport, several});
  }
  return rules;
}

}  // namespace pycoll
