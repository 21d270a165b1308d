"""What `pycoll tune` measures: every algorithm that can run, in turn, in the same processes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.cli.cross_memory import Comparison, compare, slowest
from pycoll.cli.tune_rules import HOPELESS, HOPELESS_SIZES, Measured
from pycoll.communicator import Communicator

Call = Callable[[str], object]  # with the name of an algorithm, or "auto"


@dataclass(frozen=True)
class Plan:
    """The same on every rank."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes of the whole vector, ascending
    rounds: int = 9
    batch_seconds: float = 0.002
    seed: int = 1
    cross_memory: tuple[
        int, ...
    ] = ()  # sizes at which staging and cross-memory attach are compared


@dataclass(frozen=True)
class Found:
    """Everything that one run of the ranks has measured."""

    measured: list[Measured]
    cross_memory: list[Comparison]
    cross_memory_problem: str = ""  # why it was not compared


def measure(group: Communicator, plan: Plan) -> Found:
    """Runs on every rank of `group` at once; all return the same."""
    measured = [measure_collective(group, plan, name) for name in plan.collectives]
    comparisons: list[Comparison] = []
    problem = ""
    if plan.cross_memory and group.world_size == 2 and group.transport == "shm":
        try:
            comparisons = compare(group, plan.cross_memory)
        except OSError as error:
            problem = str(error)
    return Found(measured, comparisons, problem)


def measure_collective(group: Communicator, plan: Plan, collective: str) -> Measured:
    sizes = plan.sizes if collective != "barrier" else (0,)
    several = on_several_hosts(group)
    shuffle = random.Random(plan.seed)  # the same order on every rank
    times: dict[str, list[float]] = {}
    fastest: dict[str, list[float]] = {}
    lost: dict[str, int] = {}
    for size in sizes:
        call = call_of(group, collective, size)
        names = times or usable(collective, call)
        racing = [name for name in names if lost.get(name, 0) < HOPELESS_SIZES]
        rounds = race(group, call, racing, plan, shuffle)
        best = min(median(values) for values in rounds.values())
        for name in names:
            values = rounds.get(name, [math.inf])
            value = median(values)
            times.setdefault(name, []).append(value)
            fastest.setdefault(name, []).append(min(values))
            lost[name] = lost.get(name, 0) + 1 if value > HOPELESS * best else 0
    builtin = tuple(builtin_choice(group, collective, size, several) for size in sizes)
    place = (group.world_size, group.transport, several)
    return Measured(collective, *place, sizes, times, fastest, builtin)


def builtin_choice(group: Communicator, collective: str, size: int, several: bool) -> str:
    return _core.select_algorithm(
        collective,
        size,
        has_window=group.transport == "shm",
        several_hosts=several,
        ranks=group.world_size,
        transport=group.transport,
    )


def on_several_hosts(group: Communicator) -> bool:
    mine = np.frombuffer(_core.host_identity().encode().ljust(512)[:512], np.uint8)
    everybody = np.empty((group.world_size, mine.size), np.uint8)
    group.all_gather(everybody, mine)
    return bool((everybody != everybody[0]).any())


def usable(collective: str, call: Call) -> list[str]:
    """The algorithms that a call may ask for here: every rank finds the same, and nothing is sent
    by one that is refused. Not those that work on shareable arrays: the arrays here are none."""
    found = []
    for info in _core.algorithms(collective):
        if info.needs_lease:
            continue
        try:
            call(info.name)
        except _core.InvalidArgumentError:
            continue
        found.append(info.name)
    return found


def race(
    group: Communicator, call: Call, names: Sequence[str], plan: Plan, shuffle: random.Random
) -> dict[str, list[float]]:
    """Microseconds a call of each, of the slowest rank, one value a round. In each round each has
    one batch, in an order drawn anew, so that what else the machine does hits all alike."""
    counts = {}
    for name in names:
        call(name)
        seconds = slowest(group, [timed(group, partial(call, name), 3)])[0]
        counts[name] = max(1, min(500, int(plan.batch_seconds / seconds)))
    rounds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(plan.rounds):
        order = list(names)
        shuffle.shuffle(order)
        taken = [timed(group, partial(call, name), counts[name]) for name in order]
        for name, seconds in zip(order, slowest(group, taken), strict=True):
            rounds[name].append(seconds * 1e6)
    return rounds


def timed(group: Communicator, call: Callable[[], object], count: int) -> float:
    """Seconds a call. Ranks leave a barrier some microseconds apart: one call more evens that out,
    and brings this algorithm's memory into the caches."""
    group.barrier()
    call()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def call_of(group: Communicator, collective: str, size: int) -> Call:
    """A call whose vector over all ranks has about `size` bytes, as the selector counts them."""
    whole = np.ones(max(1, size // 4), np.float32)
    world = group.world_size
    if collective == "barrier":
        return lambda algorithm: group.barrier(algorithm=algorithm)
    if collective in ("all_reduce", "broadcast", "reduce"):
        run: Any = getattr(group, collective)
        return lambda algorithm: run(whole, algorithm=algorithm)
    part = np.ones(max(1, size // 4 // world), np.float32)
    parts = np.ones((world, part.size), np.float32)
    if collective == "all_gather":
        return lambda algorithm: group.all_gather(parts, part, algorithm=algorithm)
    if collective == "reduce_scatter":
        return lambda algorithm: group.reduce_scatter(part, parts, algorithm=algorithm)
    at_root = parts if group.rank == 0 else None
    if collective == "gather":
        return lambda algorithm: group.gather(at_root, part, algorithm=algorithm)
    if collective == "scatter":
        return lambda algorithm: group.scatter(part, at_root, algorithm=algorithm)
    raise ValueError(f"{collective} has nothing to choose from")
