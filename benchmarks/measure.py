"""The ranks' side of a benchmark: several backends timed in turn, in the same processes.

A contender is one process group: a torch.distributed backend, for pycoll with the built-in
selection or one forced algorithm. Each *round* times one batch of calls of every contender, in an
order that is shuffled anew. So whatever else the machine does meanwhile hits all contenders alike,
and the ratio of two of them means something where the figures themselves do not.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pycoll  # noqa: F401  registers the backend

CHUNK = 1 << 20  # elements filled or compared at a time
FEWEST_ROUNDS = 5  # unless the plan wants fewer
# Batches whose calls are timed one by one. Reading the clock costs a call about 0.1 us, so they are
# kept apart from the batches that give the median.
STAMPED_ROUNDS = 3


@dataclass(frozen=True)
class Contender:
    """A backend, for pycoll with an algorithm forced ("" lets it choose)."""

    backend: str
    algorithm: str = ""

    @property
    def name(self) -> str:
        return self.algorithm or self.backend


@dataclass(frozen=True)
class Plan:
    """What to measure and how; the same on every rank."""

    contenders: tuple[Contender, ...]
    sizes: tuple[int, ...]  # bytes
    dtype: str = "float32"
    iterations: int = 0  # calls a batch; 0: as many as take about batch_seconds
    batch_seconds: float = 0.025
    warmup: int = 5
    rounds: int = 21
    size_seconds: float = 4.0  # for the rounds of one size: large ones get fewer rounds
    check: bool = False
    seed: int = 1
    timeout: float = 300.0


@dataclass
class Sample:
    """One contender at one size. Times are microseconds a call, of the slowest rank.

    A collective is finished when its last rank is: the mean over ranks, or rank 0 alone, would
    credit an algorithm for letting some ranks go early.
    """

    name: str
    iterations: int
    rounds: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    wrong: int | None = None  # elements over all ranks; None: not checked


@dataclass
class Row:
    """All contenders at one size."""

    bytes: int
    elements: int
    samples: list[Sample]


class Group:
    """A contender's process group, with the maximum over ranks of numbers every rank has."""

    def __init__(self, contender: Contender, timeout: datetime.timedelta) -> None:
        self.name = contender.name
        with algorithm_forced(contender):
            self.handle: Any = dist.new_group(backend=contender.backend, timeout=timeout)

    def calls(self, tensor: torch.Tensor, count: int) -> None:
        all_reduce, group = dist.all_reduce, self.handle
        for _ in range(count):
            all_reduce(tensor, group=group)

    def batch(self, tensor: torch.Tensor, count: int) -> list[float]:
        """Seconds a call (one value), from two clock readings around `count` calls."""
        start = time.perf_counter()
        self.calls(tensor, count)
        return [(time.perf_counter() - start) / count]

    def stamped_batch(self, tensor: torch.Tensor, count: int) -> list[float]:
        """Seconds of each of `count` calls."""
        all_reduce, group, clock = dist.all_reduce, self.handle, time.perf_counter
        stamps = [clock()]
        for _ in range(count):
            all_reduce(tensor, group=group)
            stamps.append(clock())
        return [after - before for before, after in itertools.pairwise(stamps)]


@contextmanager
def algorithm_forced(contender: Contender) -> Iterator[None]:
    """PYCOLL_ALGO for the group that is made inside: a group reads it once, when it is made."""
    before = os.environ.get("PYCOLL_ALGO")
    if contender.algorithm:
        os.environ["PYCOLL_ALGO"] = f"all_reduce={contender.algorithm}"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYCOLL_ALGO", None)
        else:
            os.environ["PYCOLL_ALGO"] = before


def slowest(values: list[float]) -> list[float]:
    """The maximum over ranks of each value (over the default group, which is no contender)."""
    if not values:
        return []
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def run_rank(rank: int, world_size: int, directory: str, plan: Plan, rows: Connection) -> None:
    """One rank of a run; rank 0 sends a Row for each size through `rows`."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=plan.timeout)
    store = dist.FileStore(str(Path(directory) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        groups = [Group(contender, timeout) for contender in plan.contenders]
        dtype = getattr(torch, plan.dtype)
        # One buffer for all, touched once: no contender pays for page faults of another.
        elements = max(1, max(plan.sizes) // dtype.itemsize)
        buffer = torch.zeros(elements, dtype=dtype).fill_(1)
        shuffle = random.Random(plan.seed)
        for size in plan.sizes:
            tensor = buffer[: max(1, size // dtype.itemsize)]
            row = measure_size(plan, groups, tensor, shuffle)
            if rank == 0:
                rows.send(row)
    finally:
        dist.destroy_process_group()


def measure_size(
    plan: Plan, groups: list[Group], tensor: torch.Tensor, shuffle: random.Random
) -> Row:
    samples = []
    for group in groups:
        wrong = count_wrong(group, tensor) if plan.check else None
        samples.append(Sample(group.name, iterations=0, wrong=wrong))
    fill(tensor)
    seconds = [calibrate(plan, group, tensor) for group in groups]
    for sample, estimate in zip(samples, seconds, strict=True):
        sample.iterations = plan.iterations or max(1, round(plan.batch_seconds / estimate))
    round_seconds = sum(s.iterations * t for s, t in zip(samples, seconds, strict=True))
    rounds = min(plan.rounds, max(FEWEST_ROUNDS, int(plan.size_seconds / round_seconds)))

    # Where every batch is one call, rounds have timed single calls already.
    stamped = STAMPED_ROUNDS if max(sample.iterations for sample in samples) > 1 else 0
    pairs = list(zip(groups, samples, strict=True))
    gc.collect()
    gc.disable()
    try:
        turns = [Group.batch] * rounds + [Group.stamped_batch] * stamped
        shuffle.shuffle(turns)  # the same seed on every rank, so the same order
        for turn in turns:
            shuffle.shuffle(pairs)
            for group, sample in pairs:
                start_together(group, tensor, sample.iterations)
                times = turn(group, tensor, sample.iterations)
                kept = sample.calls if turn is Group.stamped_batch else sample.rounds
                kept.extend(seconds * 1e6 for seconds in times)
    finally:
        gc.enable()
    for sample in samples:
        sample.rounds = slowest(sample.rounds)
        singles = sample.rounds if sample.iterations == 1 else []
        sample.calls = singles + slowest(sample.calls)
    return Row(tensor.numel() * tensor.element_size(), tensor.numel(), samples)


def start_together(group: Group, tensor: torch.Tensor, iterations: int) -> None:
    """Ranks leave the barrier some 100 us apart; a batch of several calls can afford one more call
    that brings them together and the contender's memory into the caches."""
    dist.barrier()
    if iterations > 1:
        group.calls(tensor, 1)


def calibrate(plan: Plan, group: Group, tensor: torch.Tensor) -> float:
    """Seconds a call as all ranks agree, after the warm-up (cut short where calls are slow)."""
    dist.barrier()
    cold = slowest(group.batch(tensor, 1))[0]
    group.calls(tensor, min(plan.warmup - 1, int(plan.batch_seconds / cold)))
    enough = plan.batch_seconds / 5
    count = 1
    while True:
        seconds = slowest(group.batch(tensor, count))[0]
        if count * seconds >= enough:
            return seconds
        count = max(count + 1, min(10 * count, int(enough / seconds) + 1))


def fill(tensor: torch.Tensor) -> None:
    """Ordinary values. Repeated sums in place grow to inf, which costs no more to add. Zeros would
    stay, but would not do: some CPUs skip writing zeros over zeros."""
    for start, stop in chunks(tensor):
        tensor[start:stop] = torch.arange(start, stop) % 251 + 1


def chunks(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Bounds of parts that are worked on one at a time, so that temporary memory stays small."""
    elements = tensor.numel()
    return [(at, min(at + CHUNK, elements)) for at in range(0, elements, CHUNK)]


def pattern(start: int, stop: int, rank: int, modulus: int) -> torch.Tensor:
    """Small integers that depend on rank and position."""
    return (torch.arange(start, stop) * 7 + start // 3 + rank * 13) % modulus


def count_wrong(group: Group, tensor: torch.Tensor) -> int:
    """Elements over all ranks that are not the exact sum.

    The sums are integers that every dtype holds exactly, whatever the order of summing: up to 256,
    where bfloat16 ends.
    """
    world_size = dist.get_world_size()
    modulus = max(2, 256 // world_size)
    for start, stop in chunks(tensor):
        tensor[start:stop] = pattern(start, stop, dist.get_rank(), modulus)
    group.calls(tensor, 1)
    wrong = 0
    for start, stop in chunks(tensor):
        expected = sum(pattern(start, stop, rank, modulus) for rank in range(world_size))
        wrong += int((tensor[start:stop].to(torch.int64) != expected).sum())
    total = torch.tensor([wrong])
    dist.all_reduce(total)
    return int(total)
