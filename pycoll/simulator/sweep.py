"""Times of several algorithms over several sizes, and where one overtakes another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pycoll.simulator.topology import Topology


@dataclass
class Curve:
    """One algorithm: seconds by size in bytes, and why some sizes (or all) have none."""

    algorithm: str
    seconds: dict[int, float] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    simulated_ranks: int = 0
    cpu: float = 0.0  # seconds of CPU that the simulation itself took
    events: int = 0


@dataclass(frozen=True)
class Plan:
    """What to simulate; `options` go to `_core.simulate` as they are."""

    collective: str
    algorithms: Sequence[str]
    ranks: int
    sizes: Sequence[int]
    topology: Topology
    # Seconds of CPU for an algorithm: what is larger is left out when they are spent. Of CPU, so
    # that a busy machine leaves out no more than an idle one.
    budget: float = math.inf
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Crossover:
    """From about `bytes` on, `after` is faster than `before`, which was the best up to there."""

    bytes: float
    before: str
    after: str


def run(plan: Plan, progress: Callable[[str, int], None] = lambda *_: None) -> list[Curve]:
    """One curve an algorithm, sizes from small to large."""
    from pycoll import _core

    machine = plan.topology.machine()
    curves = []
    for algorithm in plan.algorithms:
        curve = Curve(algorithm)
        for size in sorted(plan.sizes):
            if curve.cpu > plan.budget:
                curve.refusals[size] = f"left out after {curve.cpu:.0f} s of CPU (--budget)"
                continue
            progress(algorithm, size)
            started = time.process_time()
            try:
                result = _core.simulate(
                    plan.collective, algorithm, plan.ranks, size, machine, **plan.options
                )
            except _core.InvalidArgumentError as error:
                curve.refusals[size] = str(error)
            else:
                curve.seconds[size] = result.seconds
                curve.rounds[size] = result.rounds
                curve.simulated_ranks = result.simulated_ranks
                curve.events += result.events
            curve.cpu += time.process_time() - started
        curves.append(curve)
    return curves


def best(curves: Iterable[Curve], size: int) -> Curve | None:
    """The fastest at a size."""
    able = [curve for curve in curves if size in curve.seconds]
    return min(able, key=lambda curve: curve.seconds[size], default=None)


def crossovers(curves: Sequence[Curve], sizes: Sequence[int]) -> list[Crossover]:
    """Where the best algorithm changes, between two sizes by straight lines in the log-log plot."""
    found = []
    before, previous = None, 0
    for size in sorted(sizes):
        now = best(curves, size)
        if now is None:
            continue
        if before is not None and now is not before:
            found.append(
                Crossover(meeting(before, now, previous, size), before.algorithm, now.algorithm)
            )
        before, previous = now, size
    return found


def meeting(first: Curve, second: Curve, left: int, right: int) -> float:
    """The size at which two curves meet between two sizes, at the left one the first is faster."""
    if left not in second.seconds or right not in first.seconds:
        return float(right)
    ahead = math.log(second.seconds[left] / first.seconds[left])
    behind = math.log(first.seconds[right] / second.seconds[right])
    share = ahead / (ahead + behind) if ahead + behind > 0 else 1.0
    return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))
