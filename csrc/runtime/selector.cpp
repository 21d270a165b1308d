#include "runtime/selector.h"

#include <algorithm>
#include <bit>

#include "core/error.h"

namespace pycoll {
namespace {

constexpr uint64_t kMax = SelectionRule::kMaxBytes;

enum class Where : uint8_t { anywhere, one_host, several_hosts };
enum class Ranks : uint8_t { any, powers_of_two };

struct BuiltinRule {
  Collective collective;
  std::string_view algorithm;
  uint64_t from;
  uint64_t to;
  Where where = Where::anywhere;
  Ranks ranks = Ranks::any;
};

// Direct steps win at every size where memory is shared; the message forms are what is left without
// it: few hops for small vectors, little traffic for large ones. On one host messages cost more,
// next to bytes, than between hosts, so what sends few of them wins up to larger sizes. Crossovers:
// benchmarks/all_reduce.py --algorithms, `pycoll tune`. The chains are there for groups that
// promise one order of summation.
// Where all ranks' vectors are in shareable memory, nothing is staged.
constexpr BuiltinRule kBuiltin[] = {
    {Collective::all_reduce, "zero_copy", 64 << 10, kMax},
    {Collective::all_gather, "zero_copy", 64 << 10, kMax},
    {Collective::reduce_scatter, "zero_copy", 64 << 10, kMax},
    {Collective::broadcast, "zero_copy", 64 << 10, kMax},
    {Collective::reduce, "zero_copy", 64 << 10, kMax},
    {Collective::gather, "zero_copy", 64 << 10, kMax},
    {Collective::scatter, "zero_copy", 64 << 10, kMax},
    {Collective::all_reduce, "one_shot", 0, 16 << 10},
    {Collective::all_reduce, "two_shot", 16 << 10, kMax},
    {Collective::all_reduce, "recursive_doubling", 0, 256 << 10, Where::one_host,
     Ranks::powers_of_two},
    {Collective::all_reduce, "halving_doubling", 256 << 10, 4 << 20, Where::one_host,
     Ranks::powers_of_two},
    {Collective::all_reduce, "recursive_doubling", 0, 64 << 10},
    {Collective::all_reduce, "hierarchical", 64 << 10, kMax, Where::several_hosts},
    {Collective::all_reduce, "ring", 64 << 10, kMax},
    {Collective::all_reduce, "chain", 0, kMax},
    {Collective::all_gather, "one_shot", 0, kMax},
    {Collective::all_gather, "recursive_doubling", 0, 64 << 10},
    {Collective::all_gather, "ring", 64 << 10, kMax},
    {Collective::reduce_scatter, "one_shot", 0, kMax},
    {Collective::reduce_scatter, "recursive_halving", 0, 64 << 10},
    {Collective::reduce_scatter, "ring", 64 << 10, kMax},
    {Collective::reduce_scatter, "chain", 0, kMax},
    {Collective::broadcast, "one_shot", 0, kMax},
    {Collective::broadcast, "tree", 0, 1 << 20},
    {Collective::broadcast, "ring", 1 << 20, kMax},
    {Collective::barrier, "one_shot", 0, kMax},
    {Collective::barrier, "recursive_doubling", 0, kMax},
    {Collective::reduce, "one_shot", 0, kMax},
    {Collective::reduce, "tree", 0, 1 << 20},
    {Collective::reduce, "ring", 1 << 20, kMax},
    {Collective::reduce, "chain", 0, kMax},
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
  SelectionRule rule{.collective = collective, .algorithm = text};
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

// With two ranks there is one sum, whose first operand is the lower rank's in both orders.
bool in_rank_order(const Algorithm& algorithm, int32_t ranks) {
  if (!reduces(algorithm.collective) || ranks == 1) return true;
  ProgramRequest request;
  request.collective = algorithm.collective;
  request.world_size = ranks;
  const Order order = build_program(algorithm.name, request).order;
  return order == Order::rank_order || (order == Order::lower_first && ranks == 2);
}

bool covers(const SelectionRule& rule, const SelectionInput& input) {
  return input.bytes >= rule.from && (input.bytes < rule.to || rule.to == kMax) &&
         input.ranks >= rule.least_ranks && input.ranks <= rule.most_ranks &&
         (rule.transport.empty() || rule.transport == input.transport) &&
         rule.several_hosts.value_or(input.several_hosts) == input.several_hosts;
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

std::string fingerprint_of(const std::vector<SelectionRule>& table) {
  if (table.empty()) return "none";
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const SelectionRule& rule : table) {
    const int several = rule.several_hosts ? static_cast<int>(*rule.several_hosts) : 2;
    const std::string text =
        concat(name_of(rule.collective), ' ', rule.algorithm, ' ', rule.from, ' ', rule.to, ' ',
               rule.least_ranks, ' ', rule.most_ranks, ' ', rule.transport, ' ', several, '\n');
    for (const unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  }
  return concat(table.size(), "-rules-", std::hex, hash);
}

std::string why_unusable(const Algorithm& algorithm, const SelectionInput& input) {
  if (algorithm.needs_window && !input.has_window) {
    return "it reads peers' memory, which the transport of this group does not offer";
  }
  if (input.fifo_depth < static_cast<uint64_t>(algorithm.min_depth)) {
    return concat("it needs ", algorithm.min_depth, " messages in flight between two ranks, and ",
                  "PYCOLL_FIFO_DEPTH is ", input.fifo_depth);
  }
  if (algorithm.needs_lease && !input.leases) {
    return "it works on the ranks' own vectors, which are not all in shareable memory";
  }
  return "";
}

Selector::Selector(const SelectorSettings& settings) : determinism_(settings.determinism) {
  const bool rules_of_users = !settings.algo.empty() || !settings.table.empty();
  if (determinism_ == Determinism::algorithm || rules_of_users) {
    for (const Algorithm& row : algorithms()) {
      if (!in_rank_order(row, settings.ranks)) unordered_.insert(&row);
    }
  }
  for (SelectionRule& rule : parse_selection(settings.algo)) {
    add(Layer::environment, std::move(rule));
  }
  // Before the table: that was measured on ordinary memory.
  add_builtin(/*leases=*/true, settings.ranks);
  for (const SelectionRule& rule : settings.table) add(Layer::table, rule);
  add_builtin(/*leases=*/false, settings.ranks);
}

// The rules whose algorithms need leases, or the others.
void Selector::add_builtin(bool leases, int32_t ranks) {
  for (const BuiltinRule& rule : kBuiltin) {
    if (find_algorithm(rule.collective, rule.algorithm)->needs_lease != leases) continue;
    if (rule.ranks == Ranks::powers_of_two && !std::has_single_bit(static_cast<uint32_t>(ranks))) {
      continue;
    }
    SelectionRule full{.collective = rule.collective,
                       .algorithm = std::string(rule.algorithm),
                       .from = rule.from,
                       .to = rule.to};
    if (rule.where != Where::anywhere) full.several_hosts = rule.where == Where::several_hosts;
    add(Layer::builtin, std::move(full));
  }
}

void Selector::add(Layer layer, SelectionRule rule) {
  const Algorithm* algorithm = find_algorithm(rule.collective, rule.algorithm);
  if (algorithm == nullptr && rule.algorithm != "auto") {
    fail(ErrorKind::invalid_argument, "the selection table names '", rule.algorithm,
         "', which is no algorithm of ", name_of(rule.collective), "; there are: auto, ",
         algorithm_names(rule.collective));
  }
  if (algorithm != nullptr && breaks_promise(*algorithm)) {
    if (layer != Layer::environment) return;
    fail(ErrorKind::invalid_argument, "PYCOLL_ALGO names ", algorithm->name, " for ",
         name_of(rule.collective), ", but ", why_not(*algorithm, {rule.collective}));
  }
  rows_[static_cast<size_t>(rule.collective)].push_back({std::move(rule), algorithm, layer});
}

std::string Selector::why_not(const Algorithm& algorithm, const SelectionInput& input) const {
  if (!breaks_promise(algorithm)) return why_unusable(algorithm, input);
  std::string others;
  for (const Algorithm& row : algorithms()) {
    if (row.collective != algorithm.collective || breaks_promise(row)) continue;
    if (!others.empty()) others += ", ";
    others += row.name;
  }
  return concat("it does not combine contributions in the order of ranks, which ",
                "PYCOLL_DETERMINISM=algorithm promises; these do: ", others);
}

const Algorithm& Selector::select(const SelectionInput& input) const {
  const Algorithm& chosen = first_that_can(input);
  if (!chosen.needs_lease || determinism_ == Determinism::ranks) return chosen;
  // Which memory a vector is in may change from run to run. What runs in its place where there are
  // no leases must then sum in the same order, which is that of ranks.
  SelectionInput ordinary = input;
  ordinary.leases = false;
  const Algorithm& other = first_that_can(ordinary);
  return unordered_.contains(&other) ? other : chosen;
}

const Algorithm& Selector::first_that_can(const SelectionInput& input) const {
  bool skip_environment = false;
  bool skip_table = false;
  for (const Row& row : rows_[static_cast<size_t>(input.collective)]) {
    if (row.layer == Layer::environment && skip_environment) continue;
    if (row.layer == Layer::table && skip_table) continue;
    if (!covers(row.rule, input)) continue;
    if (row.algorithm == nullptr) {
      (row.layer == Layer::environment ? skip_environment : skip_table) = true;
    } else if (why_unusable(*row.algorithm, input).empty()) {
      return *row.algorithm;
    }
  }
  fail(ErrorKind::invalid_argument, "no algorithm of ", name_of(input.collective),
       " can run here; there are: ", algorithm_names(input.collective));
}

}  // namespace pycoll
