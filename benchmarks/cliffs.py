"""Looks for cliffs: sizes at which a collective is much slower than its neighbours predict.

    python benchmarks/cliffs.py                                # all_reduce, 2 ranks, 64 B to 16 MiB
    python benchmarks/cliffs.py --collective broadcast --ranks 4 --end 1M
    python benchmarks/cliffs.py --transport tcp

Sizes grow in steps of 1.25x. A size is a cliff where its median over rounds is more than 1.5 times
what both neighbours predict (a straight line through them in logarithms), or more than 1.5 times
the smaller neighbour's, scaled by the size. When there are any, all is measured again, and those
count that are there again. The exit code is 1 when there are any.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pycoll.cli.cross_memory import slowest
from pycoll.cli.ranks import on_local_ranks
from pycoll.cli.tune import sizes_between
from pycoll.cli.tune_measure import call_of, timed
from pycoll.communicator import Communicator
from pycoll.selection import parse_bytes

STEP = 1.25
LIMIT = 1.5


@dataclass(frozen=True)
class Sweep:
    collective: str
    sizes: tuple[int, ...]
    rounds: int
    batch_seconds: float
    quantile: float = 0.5  # over rounds
    seed: int = 1


@dataclass(frozen=True)
class Cliff:
    index: int
    size: int
    measured: float  # microseconds
    predicted: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def sweep(group: Communicator, plan: Sweep) -> tuple[list[float], list[str]]:
    """Microseconds of the slowest rank, a quantile over rounds, and the algorithm of each size.

    A round has a batch of every size, in an order drawn anew: what else the machine does does not
    hit neighbours alike, or one size alone.
    """
    calls = [call_of(group, plan.collective, size) for size in plan.sizes]
    counts = []
    for call in calls:
        seconds = slowest(group, [timed(group, partial(call, "auto"), 3)])[0]
        counts.append(max(1, min(500, int(plan.batch_seconds / seconds))))
    shuffle = random.Random(plan.seed)
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(plan.rounds):
        order = list(range(len(calls)))
        shuffle.shuffle(order)
        taken = [timed(group, partial(calls[i], "auto"), counts[i]) for i in order]
        for i, seconds in zip(order, slowest(group, taken), strict=True):
            rounds[i].append(seconds * 1e6)
    names = [group.algorithm_for(plan.collective, size) for size in plan.sizes]
    at = math.ceil(plan.quantile * plan.rounds) - 1
    return [sorted(values)[max(at, 0)] for values in rounds], names


def cliffs(sizes: Sequence[int], times: Sequence[float]) -> list[Cliff]:
    """The sizes whose time is more than LIMIT times what their neighbours predict."""
    found = []
    for i in range(1, len(sizes)):
        predicted = times[i - 1] * sizes[i] / sizes[i - 1]
        if i + 1 < len(sizes):
            predicted = min(predicted, interpolate(sizes, times, i))
        if times[i] > LIMIT * predicted:
            found.append(Cliff(i, sizes[i], times[i], predicted))
    return found


def interpolate(sizes: Sequence[int], times: Sequence[float], i: int) -> float:
    """The time at size i on a line through its neighbours, in logarithms."""
    low, here, high = (math.log(sizes[k]) for k in (i - 1, i, i + 1))
    part = (here - low) / (high - low)
    return math.exp(math.log(times[i - 1]) * (1 - part) + math.log(times[i + 1]) * part)


def confirmed(found: Sequence[Cliff], again: Sequence[Cliff]) -> list[Cliff]:
    """Those of the first run that the second has too, or finds one size away."""
    return [c for c in found if any(abs(c.index - other.index) <= 1 for other in again)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collective", default="all_reduce", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--transport", choices=("shm", "tcp"), help="default: the best there is")
    parser.add_argument("-b", "--begin", default="64", help="smallest size (default: %(default)s)")
    parser.add_argument("-e", "--end", default="16M", help="largest size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument(
        "--quantile",
        type=float,
        default=0.5,
        help="of the rounds, instead of the median: 0 takes the fastest, for a machine that has "
        "other work to do",
    )
    parser.add_argument("--batch-ms", type=float, default=2.0, help="default: %(default)s")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    sizes = sizes_between(parse_bytes(given.begin, "-b"), parse_bytes(given.end, "-e"), STEP)
    plan = Sweep(given.collective, sizes, given.rounds, given.batch_ms / 1e3, given.quantile)
    variables = {"PYCOLL_TRANSPORT": given.transport} if given.transport else {}
    times, names = on_local_ranks(given.ranks, sweep, plan, variables=variables)
    found = cliffs(sizes, times)
    if found:
        again, _ = on_local_ranks(given.ranks, sweep, plan, variables=variables)
        found = confirmed(found, cliffs(sizes, again))
    print(f"{given.collective}, {given.ranks} ranks: {len(sizes)} sizes, steps of {STEP}")
    print(f"{'bytes':>10}{'us':>12}  algorithm")
    slow = {cliff.index: cliff for cliff in found}
    for i, (size, time, name) in enumerate(zip(sizes, times, names, strict=True)):
        mark = f"  <- {slow[i].ratio:.2f} times what its neighbours predict" if i in slow else ""
        print(f"{size:>10}{time:>12.4g}  {name}{mark}")
    print(f"{len(found)} cliffs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
