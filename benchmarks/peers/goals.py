"""What pycoll must reach against the peers, and whether it has."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

KIB, MIB = 1024, 1024**2

# Names of our jobs, by what they measure.
OURS = {"c": "pycoll core", "direct": "pycoll.all_reduce", "array": "Communicator.all_reduce"}

# "Ahead": so many times as fast in the geometric mean over sizes, and nowhere below the second.
AHEAD_MEAN, AHEAD_LEAST = 1.05, 0.95

# Seconds a call by contestant, for each run, by size.
Measured = Mapping[int, Sequence[Mapping[str, float]]]


def format_size(size: int) -> str:
    for unit, name in ((MIB, "M"), (KIB, "K")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


@dataclass(frozen=True)
class Goal:
    """The best peer's time over ours, at each size: at least `least`; `mean` over all of them."""

    name: str
    language: str  # c, python: who is compared with whom
    ours: str
    sizes: tuple[int, ...]
    least: float
    mean: float = 0.0
    ranks: int = 2
    shareable: bool = False

    def describe(self) -> str:
        sizes = ", ".join(map(format_size, self.sizes))
        mean = f", geometric mean at least {self.mean:g}" if self.mean else ""
        memory = ", shareable memory" if self.shareable else ""
        limit = f"at most {1 / self.least:.3g}x the best peer's time"
        if self.least > 1.3 or self.mean:
            limit = f"at least {self.least:g} times as fast as the best peer"
        return f"{self.contestant}, {self.ranks} ranks{memory}: {limit}{mean} at {sizes}"

    @property
    def contestant(self) -> str:
        return f"{self.ours}, shareable" if self.shareable else self.ours

    def only(self, sizes: set[int]) -> Goal:
        return replace(self, sizes=tuple(size for size in self.sizes if size in sizes))

    def judge(self, measured: Measured) -> Outcome:
        rows = []
        for size in self.sizes:
            runs = measured[size]
            if self.contestant in runs[0]:
                rows.append(make_row(self.contestant, size, runs))
        return Outcome(self, rows)


@dataclass(frozen=True)
class Row:
    """One size: medians over runs, in seconds; `ratio` is the median of the runs' ratios."""

    size: int
    ours: float
    peer: str  # the best one
    theirs: float
    ratio: float
    ratios: tuple[float, ...]


def make_row(contestant: str, size: int, runs: Sequence[Mapping[str, float]]) -> Row:
    """The best peer is chosen in each run: being best by luck counts for the peers."""
    ours, theirs = [], []
    names = []
    for run in runs:
        peers = {name: time for name, time in run.items() if not is_ours(name)}
        best = min(peers, key=lambda name: peers[name])
        names.append(best)
        theirs.append(peers[best])
        ours.append(run[contestant])
    ratios = tuple(peer / our for peer, our in zip(theirs, ours, strict=True))
    return Row(
        size,
        statistics.median(ours),
        statistics.mode(names),
        statistics.median(theirs),
        statistics.median(ratios),
        ratios,
    )


def is_ours(name: str) -> bool:
    return name.removesuffix(", shareable") in OURS.values()


@dataclass(frozen=True)
class Outcome:
    goal: Goal
    rows: list[Row]

    def mean(self) -> float:
        return statistics.geometric_mean(row.ratio for row in self.rows) if self.rows else 0.0

    def reached(self) -> bool:
        """False also when nothing was measured: a missing call reaches no goal."""
        complete = len(self.rows) == len(self.goal.sizes) > 0
        return (
            complete
            and all(row.ratio >= self.goal.least for row in self.rows)
            and self.mean() >= self.goal.mean
        )

    def lines(self) -> list[str]:
        verdict = "pass" if self.reached() else "FAIL" if self.rows else "FAIL (not measured)"
        lines = [f"{verdict}  {self.goal.name}: {self.goal.describe()}"]
        for row in self.rows:
            mark = "" if row.ratio >= self.goal.least else "  <"
            lines.append(
                f"      {format_size(row.size):>5}  {1e6 * row.ours:10.2f} us   "
                f"{row.peer} {1e6 * row.theirs:.2f} us   {row.ratio:.2f} times as fast "
                f"({min(row.ratios):.2f} to {max(row.ratios):.2f}){mark}"
            )
        if self.goal.mean and self.rows:
            lines.append(f"      geometric mean {self.mean():.2f}")
        return lines

    def as_json(self) -> dict[str, object]:
        rows = [vars(row) for row in self.rows]
        mean = self.mean()
        facts = {"name": self.goal.name, "goal": self.goal.describe(), "reached": self.reached()}
        return {**facts, "geometric_mean": mean, "rows": rows}


GOALS = (
    Goal("c-small", "c", OURS["c"], (4, 64, KIB), 1.0),
    Goal("c-medium", "c", OURS["c"], (16 * KIB, 64 * KIB, 256 * KIB, MIB), 1 / 1.1),
    Goal("c-large", "c", OURS["c"], (4 * MIB, 16 * MIB, 64 * MIB), AHEAD_LEAST, AHEAD_MEAN),
    Goal("c-shareable", "c", OURS["c"], (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB), 2.0,
         shareable=True),
    Goal("python-small", "python", OURS["direct"], (4, KIB), 1 / 0.8),
    Goal("python-16K", "python", OURS["direct"], (16 * KIB,), 1.0),
    Goal("python-4-ranks", "python", OURS["direct"], (4,), 1.0, ranks=4),
    Goal("python-8-ranks", "python", OURS["direct"], (4,), 1.0, ranks=8),
)  # fmt: skip
