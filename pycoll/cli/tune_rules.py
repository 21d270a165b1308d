"""From measured times to rules: which algorithm where, and where one takes over from another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pycoll.selection import MAX_BYTES, Rule

# Natural logarithms of ratios of times. A rule begins only where the sizes behind it gain more than
# the first in sum: one size that measured 8 % better by chance changes nothing. Of two algorithms
# that are as good as equal, the one that is chosen without a table stays. What counts as better is
# so in the median and in the fastest round: other work on the machine moves one of them easily.
SWITCH_PENALTY = math.log(1.10)
NEWCOMER_PENALTY = math.log(1.03)
# Not measured at larger sizes: an algorithm that was so many times slower than the best one at
# HOPELESS_SIZES sizes in a row.
HOPELESS = 5.0
HOPELESS_SIZES = 3
LINE = 64  # bounds are multiples of a cache line


@dataclass(frozen=True)
class Measured:
    """Times of one collective in one place, microseconds a call."""

    collective: str
    ranks: int
    transport: str
    several_hosts: bool
    sizes: tuple[int, ...]  # bytes, ascending
    times: Mapping[str, Sequence[float]]  # medians by algorithm, one a size; inf: not measured
    fastest: Mapping[str, Sequence[float]]  # of the fastest rounds, likewise
    builtin: tuple[str, ...]  # what is chosen without a table, one a size


def choose(measured: Measured) -> list[str]:
    """The algorithm for each size: the path of least cost through sizes and algorithms.

    The cost of an algorithm at a size is the logarithm of its time over that of the one in use
    without a table (see `lag`), plus the penalties above.
    """
    names = sorted(measured.times)
    cost = dict.fromkeys(names, 0.0)
    came_from: list[dict[str, str]] = []
    for i, builtin in enumerate(measured.builtin):
        cheapest = min(names, key=cost.__getitem__)
        step: dict[str, str] = {}
        after: dict[str, float] = {}
        for name in names:
            switch = cost[cheapest] + (SWITCH_PENALTY if i else 0.0)
            step[name] = name if cost[name] <= switch else cheapest
            here = 0.0 if name == builtin else lag(measured, i, name, builtin) + NEWCOMER_PENALTY
            after[name] = min(cost[name], switch) + here
        came_from.append(step)
        cost = after
    path = [min(names, key=cost.__getitem__)]
    for step in reversed(came_from[1:]):
        path.append(step[path[-1]])
    return path[::-1]


def lag(measured: Measured, i: int, name: str, builtin: str) -> float:
    """Logarithm of the time over `builtin`'s at size i: the worse of medians and fastest rounds."""
    if math.isinf(measured.times[name][i]):
        return math.inf
    if math.isinf(measured.times[builtin][i]):
        return -math.log(HOPELESS)  # left behind by all that were measured on
    return max(
        math.log(times[name][i] / times[builtin][i]) for times in (measured.times, measured.fastest)
    )


def rules_of(measured: Measured, path: Sequence[str]) -> list[Rule]:
    """Rules without gaps from 0 to the largest size there is, in place of `path`."""
    rules: list[Rule] = []
    begin = 0
    for i, name in enumerate(path):
        last = i + 1 == len(path)
        if not last and path[i + 1] == name:
            continue
        end = MAX_BYTES if last else crossover(measured, i, name, path[i + 1])
        ranks = (measured.ranks, measured.ranks)
        place = (ranks, measured.transport, measured.several_hosts)
        rules.append(Rule(measured.collective, name, begin, end, *place))
        begin = end
    return rules


def crossover(measured: Measured, i: int, before: str, after: str) -> int:
    """Bytes where `after` takes over, between the sizes i (excluded) and i + 1.

    The times are taken as straight lines in logarithms; where they do not cross there (a switch
    that pays later on), it is half way.
    """
    low, high = measured.sizes[i], measured.sizes[i + 1]
    lead = [
        math.log(measured.times[after][k]) - math.log(measured.times[before][k]) for k in (i, i + 1)
    ]
    part = 0.5
    if math.inf > lead[0] > 0 > lead[1] > -math.inf:
        part = lead[0] / (lead[0] - lead[1])
    at = math.exp(math.log(max(low, 1)) * (1 - part) + math.log(high) * part)
    return min(max(math.ceil(at / LINE) * LINE, low + 1), high)
