"""The figures that pycoll promises for one machine, each with the run that gives it.

    python benchmarks/targets.py                 # all of them, about 10 minutes
    python benchmarks/targets.py --only gloo     # one row; --list says which there are
    python benchmarks/targets.py --json targets.json

Every figure is a ratio of contenders that took turns in the same processes (see README.md), the
median over `--runs` runs, each in fresh processes. The exit code is 1 where one is not reached.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from idle import cpu_of_a_waiting_rank

from pycoll.bench.launch import RankFailed, measure
from pycoll.bench.machine import machine, machine_lines
from pycoll.bench.plan import Contender, Plan, Row, Sample
from pycoll.bench.report import microseconds
from pycoll.bench.units import format_size, parse_size, quantile
from pycoll.cli.usage import output_file

KIB, MIB = 1 << 10, 1 << 20
PYCOLL, GLOO, FAKE, LIMIT = map(Contender, ("pycoll", "gloo", "fake", "limit"))

Measure = Callable[[Sample], float]


def p99(sample: Sample) -> float:
    return quantile(sample.calls, 0.99)


@dataclass(frozen=True)
class Result:
    """One requirement and what came of it."""

    row: str
    what: str
    figure: float
    wanted: float
    at_most: bool = False
    runs: tuple[float, ...] = ()
    unit: str = "x"

    @property
    def reached(self) -> bool:
        return self.figure <= self.wanted if self.at_most else self.figure >= self.wanted

    def line(self) -> str:
        wanted = f"{'<=' if self.at_most else '>='} {self.wanted:g}"
        spread = f"{min(self.runs):.2f}..{max(self.runs):.2f}" if self.runs else ""
        verdict = "reached" if self.reached else "NOT reached"
        return (
            f"{self.row:<10} {self.what:<42} {self.figure:>9.2f} {self.unit:<3} {wanted:>8}  "
            f"{verdict:<11}  {spread}"
        )


@dataclass(frozen=True)
class Ratio:
    """`above` over `below` at each size; by which factor it must be at least (or at most)."""

    above: Contender
    below: Contender
    wanted: dict[str, float]  # by size
    at_most: bool = False
    memory: str = "ordinary"
    ranks: int = 2
    rewrite: bool = False
    measures: tuple[tuple[str, Measure], ...] = (("time", microseconds),)

    def plan(self, seed: int, sizes: tuple[int, ...]) -> Plan:
        return Plan(
            contenders=(self.above, self.below),
            sizes=sizes,
            memory=self.memory,
            rewrite=self.rewrite,
            batch_seconds=0.015,
            rounds=9,
            fewest_rounds=3,
            # A 99th percentile wants many calls.
            stamped_rounds=9 if len(self.measures) > 1 else 3,
            size_seconds=0.8,
            seed=seed,
        )

    def results(self, row: str, runs: int) -> Iterator[Result]:
        sizes = {parse_size(size): wanted for size, wanted in self.wanted.items()}
        rows: dict[int, list[Row]] = {size: [] for size in sizes}
        for seed in range(1, runs + 1):
            for got in measure(self.plan(seed, tuple(sizes)), self.ranks):
                rows[got.bytes].append(got)
        for size, wanted in sizes.items():
            for name, value in self.measures:
                ratios = [value(got.samples[0]) / value(got.samples[1]) for got in rows[size]]
                yield Result(
                    row,
                    f"{self.title(name)} at {format_size(size)}",
                    statistics.median(ratios),
                    wanted,
                    self.at_most,
                    tuple(ratios),
                )

    def title(self, measure: str) -> str:
        ranks = f", {self.ranks} ranks" if self.ranks != 2 else ""
        return f"{measure} of {self.above.name} over {self.below.name}{ranks}"


@dataclass(frozen=True)
class Idle:
    """CPU milliseconds of a rank that waits `seconds`."""

    seconds: float = 3.0
    wanted: float = 20.0

    def results(self, row: str, runs: int) -> Iterator[Result]:
        for call, used in cpu_of_a_waiting_rank(self.seconds, runs).items():
            what = f"CPU of {self.seconds:g} s of waiting in {call}"
            yield Result(row, what, statistics.median(used), self.wanted, True, tuple(used), "ms")


def crowd(ranks: int) -> Ratio:
    """More ranks than CPUs, in the median and in the slowest hundredth of the calls."""
    wanted = {"4": 4.0, "1K": 20.0, "16K": 2.0, "256K": 2.0, "1M": 2.0, "16M": 2.0, "64M": 2.0}
    both = (("time", microseconds), ("p99", p99))
    return Ratio(GLOO, PYCOLL, wanted, ranks=ranks, measures=both)


ROWS: dict[str, Ratio | Idle] = {
    "nothing": Ratio(PYCOLL, FAKE, {"4": 1.3}, at_most=True),
    "gloo": Ratio(
        GLOO,
        PYCOLL,
        {
            "4": 8.0,
            "1K": 20.0,
            "16K": 10.0,
            "64K": 4.0,
            "256K": 4.0,
            "1M": 4.0,
            "4M": 4.0,
            "16M": 3.5,
            "64M": 3.0,
            "256M": 3.0,
        },
    ),
    "shareable": Ratio(
        GLOO,
        PYCOLL,
        {"1M": 8.0, "4M": 8.0, "16M": 7.0, "64M": 5.0, "256M": 5.0},
        memory="shareable",
    ),
    "limit": Ratio(
        LIMIT,
        PYCOLL,
        {"4M": 0.75, "16M": 0.85, "64M": 0.85, "256M": 0.85},
        memory="shareable",
        rewrite=True,
    ),
    "4 ranks": crowd(4),
    "8 ranks": crowd(8),
    "idle": Idle(),
}


def run_row(name: str, runs: int) -> list[Result]:
    results = []
    try:
        for result in ROWS[name].results(name, runs):
            results.append(result)
            print(result.line(), flush=True)
    except RankFailed as error:
        # One row that cannot be measured here (no shareable memory, no compiler) hides no other.
        print(f"{name:<10} NOT measured: {str(error).splitlines()[-1]}", flush=True)
        results.append(Result(name, "not measured", math.nan, 0.0))
    return results


def as_json(result: Result) -> dict[str, object]:
    figure = None if math.isnan(result.figure) else result.figure  # NaN is not JSON
    return asdict(result) | {"figure": figure, "reached": result.reached}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(ROWS), metavar="ROW")
    parser.add_argument("--list", action="store_true", help="the rows there are")
    parser.add_argument("--runs", type=int, default=5, help="of each (default 5)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ROWS))
        return 0
    if arguments.runs < 1:
        raise SystemExit("--runs must be at least 1")
    facts = machine()
    print("\n".join(machine_lines(facts)))
    print(f"figures   medians of {arguments.runs} runs, then the smallest and largest of them\n")
    started = time.monotonic()
    results: list[Result] = []
    for name in arguments.only or ROWS:
        results += run_row(name, arguments.runs)
    missed = [result for result in results if not result.reached]
    print(
        f"\n{len(results) - len(missed)} of {len(results)} reached, "
        f"{time.monotonic() - started:.0f} s in all"
    )
    if arguments.json:
        figures = [as_json(result) for result in results]
        facts_and_figures = {"machine": facts, "runs": arguments.runs, "results": figures}
        arguments.json.write_text(json.dumps(facts_and_figures, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
