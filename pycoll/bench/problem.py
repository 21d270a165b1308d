"""One collective at one size: what it moves, what goes in and what must come out.

`size` is what nccl-tests prints: the longer of the two vectors of a rank. Where vectors are made
of one block a rank (all_gather, ...), `count` is the elements of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pycoll.bench.collectives import COLLECTIVES, Collective
from pycoll.bench.plan import Plan

# Sums of patterns stay below this: bfloat16 is exact up to 256, int8 up to 127.
LARGEST = 120
PRIME = 113  # of patterns that nobody adds up


@dataclass(frozen=True)
class Problem:
    """One collective at one size, seen from one rank."""

    collective: str
    op: str
    root: int
    rank: int
    ranks: int
    count: int
    dtype: torch.dtype

    @classmethod
    def of(cls, plan: Plan, size: int, rank: int, ranks: int) -> Problem:
        """A size that does not come out even is rounded down, to one element at least."""
        dtype = getattr(torch, plan.dtype)
        parts = ranks if COLLECTIVES[plan.collective].blocks else 1
        count = max(1, size // (dtype.itemsize * parts))
        return cls(plan.collective, plan.op, plan.root, rank, ranks, count, dtype)

    @property
    def kind(self) -> Collective:
        return COLLECTIVES[self.collective]

    @property
    def bytes(self) -> int:
        if self.collective == "barrier":
            return 0
        return self.count * (self.ranks if self.kind.blocks else 1) * self.dtype.itemsize

    def elements(self, vector: str) -> int:
        """Of a vector that is described by `vector` in the table."""
        if vector == "all at root":
            vector = "all" if self.rank == self.root else "none"
        return {"none": 0, "one": self.count, "all": self.count * self.ranks}[vector]

    @property
    def input_elements(self) -> int:
        return self.elements(self.kind.input)

    @property
    def output_elements(self) -> int:
        return self.elements(self.kind.output)

    def given(self, rank: int, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of what `rank` puts in: small integers of rank and position."""
        at = torch.arange(start, stop)
        mixed = at * 7 + at // PRIME + rank
        if not self.kind.reduces:
            return mixed % PRIME
        if self.op == "prod":
            # One rank has a factor, whichever it is at this position; a product of many overflows.
            return torch.where(at % self.ranks == rank, mixed % PRIME + 2, 1)
        if self.op in ("min", "max"):
            return mixed % PRIME
        if self.op == "avg":  # multiples, so that the mean is whole
            return mixed % max(2, LARGEST // self.ranks**2) * self.ranks
        return mixed % max(2, LARGEST // self.ranks)

    def expected(self, start: int, stop: int) -> torch.Tensor | None:
        """Elements [start, stop) of this rank's output; None where the call promises nothing."""
        source = SOURCES.get(self.collective)
        if source is None or (self.collective == "reduce" and self.rank != self.root):
            return None
        return source(self, start, stop)


def reduced(problem: Problem, start: int, stop: int) -> torch.Tensor:
    """What all ranks gave, combined."""
    total = problem.given(0, start, stop)
    for rank in range(1, problem.ranks):
        total = COMBINE[problem.op](total, problem.given(rank, start, stop))
    return total // problem.ranks if problem.op == "avg" else total


def own_part_reduced(problem: Problem, start: int, stop: int) -> torch.Tensor:
    base = problem.rank * problem.count
    return reduced(problem, base + start, base + stop)


def gathered(problem: Problem, start: int, stop: int, offset: int = 0) -> torch.Tensor:
    """Block r from rank r, where it stands at `offset`."""
    parts = []
    for rank in range(start // problem.count, (stop - 1) // problem.count + 1):
        base = rank * problem.count
        low, high = max(start, base) - base, min(stop, base + problem.count) - base
        parts.append(problem.given(rank, offset + low, offset + high))
    return torch.cat(parts)


SOURCES: dict[str, Callable[[Problem, int, int], torch.Tensor]] = {
    "all_reduce": reduced,
    "reduce": reduced,
    "reduce_scatter": own_part_reduced,
    "all_gather": gathered,
    "gather": gathered,
    "all_to_all": lambda p, start, stop: gathered(p, start, stop, p.rank * p.count),
    "broadcast": lambda p, start, stop: p.given(p.root, start, stop),
    "scatter": lambda p, start, stop: p.given(
        p.root, p.rank * p.count + start, p.rank * p.count + stop
    ),
    "sendrecv": lambda p, start, stop: p.given((p.rank - 1) % p.ranks, start, stop),
}
COMBINE = {
    "sum": torch.add,
    "avg": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
