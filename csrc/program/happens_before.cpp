#include "program/happens_before.h"

#include <algorithm>
#include <utility>

namespace pycoll::prover {
namespace {

void join_into(Clock& clock, const Clock& other) {
  if (clock.empty()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

}  // namespace

void HappensBefore::join(int32_t process, const ClockRef& other) {
  if (other) join_into(clock(process), *other);
}

ClockRef latest(std::span<const ClockRef> clocks) {
  Clock all;
  for (const ClockRef& clock : clocks) join_into(all, *clock);
  return std::make_shared<const Clock>(std::move(all));
}

std::optional<Access> HappensBefore::read(CellHistory& cell, int32_t process, int32_t step) {
  if (!is_before(cell.write, process)) return cell.write;
  // Only the last entry is compared: a search would cost as much as the group is large.
  if (cell.reads.empty() || cell.reads.back().process != process) cell.reads.emplace_back();
  cell.reads.back() = access(process, step);
  return std::nullopt;
}

std::optional<Access> HappensBefore::write(CellHistory& cell, int32_t process, int32_t step) {
  if (!is_before(cell.write, process)) return cell.write;
  for (const Access& earlier : cell.reads) {
    if (!is_before(earlier, process)) return earlier;
  }
  cell.reads.clear();
  cell.write = access(process, step);
  return std::nullopt;
}

Arrivals::Arrivals(std::span<const int32_t> lanes_of_rank, int32_t rounds)
    : lanes_of_rank_(lanes_of_rank.begin(), lanes_of_rank.end()),
      rounds_(rounds),
      cells_(lanes_of_rank.size() * static_cast<size_t>(rounds)) {}

void Arrivals::enter(const HappensBefore& order, int32_t rank, int32_t process, int32_t round) {
  at(rank, round).entries.push_back({process, order.time_of(process, process), 0});
}

std::optional<int32_t> Arrivals::leave(const HappensBefore& order, int32_t rank, int32_t process,
                                       int32_t round) {
  RankRound& mine = at(rank, round);
  join_into(mine.known, *order.snapshot(process));
  if (++mine.left < lanes_of_rank_[static_cast<size_t>(rank)]) return std::nullopt;
  for (size_t other = 0; other < lanes_of_rank_.size(); ++other) {
    const auto& entries = at(static_cast<int32_t>(other), round).entries;
    const bool known = std::any_of(entries.begin(), entries.end(), [&](const Access& entry) {
      return mine.known[static_cast<size_t>(entry.process)] >= entry.time;
    });
    if (!known) return static_cast<int32_t>(other);
  }
  mine.known = Clock();
  return std::nullopt;
}

}  // namespace pycoll::prover
