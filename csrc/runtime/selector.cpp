#include "runtime/selector.h"

#include <limits>
#include <optional>

#include "core/config.h"
#include "core/error.h"

namespace pycoll {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

enum class Where : uint8_t { anywhere, several_hosts };

struct BuiltinRule {
  Collective collective;
  std::string_view algorithm;
  uint64_t from;
  uint64_t to;
  Where where = Where::anywhere;
};

// Direct steps win at every size where memory is shared; the message forms are what is left without
// it: few hops for small vectors, little traffic for large ones. Crossovers:
// benchmarks/all_reduce.py --algorithms.
constexpr BuiltinRule kBuiltin[] = {
    {Collective::all_reduce, "one_shot", 0, 16 << 10},
    {Collective::all_reduce, "two_shot", 16 << 10, kMax},
    {Collective::all_reduce, "recursive_doubling", 0, 64 << 10},
    {Collective::all_reduce, "hierarchical", 64 << 10, kMax, Where::several_hosts},
    {Collective::all_reduce, "ring", 64 << 10, kMax},
    {Collective::all_gather, "one_shot", 0, kMax},
    {Collective::all_gather, "recursive_doubling", 0, 64 << 10},
    {Collective::all_gather, "ring", 64 << 10, kMax},
    {Collective::reduce_scatter, "one_shot", 0, kMax},
    {Collective::reduce_scatter, "recursive_halving", 0, 64 << 10},
    {Collective::reduce_scatter, "ring", 64 << 10, kMax},
    {Collective::broadcast, "one_shot", 0, kMax},
    {Collective::broadcast, "tree", 0, 1 << 20},
    {Collective::broadcast, "ring", 1 << 20, kMax},
    {Collective::barrier, "one_shot", 0, kMax},
    {Collective::barrier, "recursive_doubling", 0, kMax},
    {Collective::reduce, "one_shot", 0, kMax},
    {Collective::reduce, "tree", 0, 1 << 20},
    {Collective::reduce, "ring", 1 << 20, kMax},
    {Collective::gather, "one_shot", 0, kMax},
    {Collective::gather, "direct", 0, kMax},
    {Collective::scatter, "one_shot", 0, kMax},
    {Collective::scatter, "direct", 0, kMax},
    {Collective::all_to_all, "direct", 0, kMax},
};

std::string collective_names() {
  std::string names;
  for (int i = 0; i < static_cast<int>(Collective::kCount); ++i) {
    if (i > 0) names += ", ";
    names += name_of(static_cast<Collective>(i));
  }
  return names;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::string::size_type begin = 0;
  for (;;) {
    const auto end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

SelectionRule parse_rule(Collective collective, const std::string& text) {
  SelectionRule rule{collective, text, 0, kMax, false};
  const auto colon = text.find(':');
  if (colon != std::string::npos) {
    rule.algorithm = text.substr(0, colon);
    const std::string range = text.substr(colon + 1);
    const auto dash = range.find('-');
    if (dash == std::string::npos) {
      fail(ErrorKind::invalid_argument, "'", text,
           "' in PYCOLL_ALGO: sizes are written FROM-TO, like 8k-1M");
    }
    try {
      rule.from = parse_bytes(range.substr(0, dash));
      rule.to = parse_bytes(range.substr(dash + 1));
    } catch (const Error& error) {
      fail(ErrorKind::invalid_argument, "'", text, "' in PYCOLL_ALGO: ", error.what());
    }
  }
  if (rule.from >= rule.to) {
    fail(ErrorKind::invalid_argument, "'", text,
         "' in PYCOLL_ALGO covers no size: FROM must be smaller than TO");
  }
  if (rule.algorithm != "auto" && find_algorithm(collective, rule.algorithm) == nullptr) {
    fail(ErrorKind::invalid_argument, "'", rule.algorithm, "' in PYCOLL_ALGO is no algorithm of ",
         name_of(collective), "; there are: auto, ", algorithm_names(collective));
  }
  return rule;
}

}  // namespace

std::vector<SelectionRule> parse_selection(const std::string& text) {
  std::vector<SelectionRule> rules;
  if (text.empty()) return rules;
  for (const std::string& part : split(text, ';')) {
    const auto equals = part.find('=');
    const auto collective = collective_from_name(part.substr(0, equals));
    if (equals == std::string::npos || !collective) {
      fail(ErrorKind::invalid_argument, "'", part,
           "' in PYCOLL_ALGO is not COLLECTIVE=ALGORITHM[:FROM-TO],...; collectives: ",
           collective_names());
    }
    for (const SelectionRule& rule : rules) {
      if (rule.collective != *collective) continue;
      fail(ErrorKind::invalid_argument, "PYCOLL_ALGO names ", name_of(*collective),
           " twice: write all its rules behind one '=', separated by commas");
    }
    for (const std::string& rule : split(part.substr(equals + 1), ',')) {
      rules.push_back(parse_rule(*collective, rule));
    }
  }
  return rules;
}

std::string why_unusable(const Algorithm& algorithm, const SelectionInput& input) {
  if (algorithm.needs_window && !input.has_window) {
    return "it reads peers' memory, which the transport of this group does not offer";
  }
  return "";
}

Selector::Selector(const std::string& environment) : rules_(parse_selection(environment)) {
  for (const BuiltinRule& rule : kBuiltin) {
    rules_.push_back({rule.collective, std::string(rule.algorithm), rule.from, rule.to,
                      rule.where == Where::several_hosts});
  }
}

const Algorithm& Selector::select(const SelectionInput& input) const {
  bool skip_environment = false;
  const size_t builtin = rules_.size() - std::size(kBuiltin);
  for (size_t i = 0; i < rules_.size(); ++i) {
    const SelectionRule& rule = rules_[i];
    if (rule.collective != input.collective) continue;
    if (input.bytes < rule.from || (input.bytes >= rule.to && rule.to != kMax)) continue;
    if (i < builtin && skip_environment) continue;
    if (rule.several_hosts && !input.several_hosts) continue;
    if (rule.algorithm == "auto") {
      skip_environment = true;
      continue;
    }
    const Algorithm* algorithm = find_algorithm(rule.collective, rule.algorithm);
    if (algorithm != nullptr && why_unusable(*algorithm, input).empty()) return *algorithm;
  }
  fail(ErrorKind::invalid_argument, "no algorithm of ", name_of(input.collective),
       " can run here; there are: ", algorithm_names(input.collective));
}

}  // namespace pycoll
