"""One case of the matrix on one rank, and what NumPy says of it.

A case that failed can be run alone:

    python tests/matrix_run.py "all_gather.ring world_size=5 transport=tcp dtype=int8 ..." [SPLIT]

where SPLIT, "aabb" say, is the host of each rank if transport=shm,tcp.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

import pycoll
from helpers_threads import ThreadRanks
from layouts import LAYOUTS, Blocks, Layout
from matrix import REDUCING, ROOTED, SIZES, SLICES, VECTORS, Case
from pycoll._calls import Call
from reference import Array, data, dtype_of, reduced

# ---- Data ----

# Of the values of a long vector. It is prime, so that no slice is a copy of another.
PERIOD = 8191


@functools.lru_cache(maxsize=16)
def elements(case: Case) -> int:
    """Of the vector, or of a block. Blocks share the largest size between them."""
    element = dtype_of(case.dtype).itemsize
    sizes = SLICES[case.slices]
    slot, window = (sizes[f"PYCOLL_{name}_BYTES"] // element for name in ("SLOT", "WINDOW"))
    blocks = "world" in VECTORS[case.collective]
    n = SIZES[case.size](1 if blocks and "w*" in case.size else case.world_size, slot, window)
    return n // case.world_size if blocks and case.size == "largest" else n


def block_length(case: Case, source: int, destination: int) -> int:
    """Of a block that goes from one rank to another, or belongs to one (source 0, say)."""
    n = elements(case)
    if case.blocks != "uneven":
        return n
    lengths = (n, 0, n + 1, n // 2, 1, 2 * n + 3, n)
    return lengths[(3 * source + 5 * destination + n) % len(lengths)]


def lengths(case: Case, rank: int) -> tuple[list[int], list[int]]:
    """Of this rank's input blocks and output blocks, wherever it has some."""
    w, ranks = case.world_size, range(case.world_size)
    of_world = [block_length(case, 0, r) for r in ranks]
    if case.collective == "all_to_all":
        return (
            [block_length(case, rank, r) for r in ranks],
            [block_length(case, r, rank) for r in ranks],
        )
    per_side = {"one": [of_world[rank]], "world": of_world}
    assert len(of_world) == w
    taken, given = VECTORS[case.collective]
    return per_side[taken], per_side[given]


@functools.lru_cache(maxsize=16)
def inputs(case: Case, rank: int) -> list[Array]:
    """Different values on every rank and at every position."""
    counts, _ = lengths(case, rank)
    total, op = sum(counts), "sum" if case.op in ("none", "premul_sum") else case.op
    kind = "small" if case.op == "premul_sum" else None
    values = data(rank, case.dtype, op, min(total, PERIOD), kind)
    return np.split(np.resize(values, total) if total > PERIOD else values, np.cumsum(counts)[:-1])


def factor(rank: int) -> float:
    return (0.5, 2.0, 1.0)[rank % 3]  # exact in every type


def reduction(case: Case, parts: list[Array]) -> Array:
    if case.op != "premul_sum":
        return reduced(parts, case.op)
    dtype = parts[0].dtype
    wide = np.complex128 if dtype.kind == "c" else np.float64
    scaled = [(part.astype(wide) * factor(r)).astype(dtype) for r, part in enumerate(parts)]
    return reduced(scaled, "sum")


def outputs(case: Case) -> list[list[Array]]:
    """What NumPy says that each rank must have in its output blocks; no blocks: no output."""
    given = [inputs(case, rank) for rank in range(case.world_size)]
    ranks, root = range(case.world_size), case.root_rank
    if case.collective in REDUCING:
        counts = [len(block) for block in given[0]]
        whole = [np.concatenate(blocks)[:PERIOD] for blocks in given]
        total = np.resize(reduction(case, whole), sum(counts))
        totals = np.split(total, np.cumsum(counts)[:-1])
        if case.collective == "reduce_scatter":
            return [[total] for total in totals]
        return [totals if case.collective != "reduce" or r == root else [] for r in ranks]
    if case.collective == "all_to_all":
        return [[given[s][r] for s in ranks] for r in ranks]
    if case.collective == "scatter":
        return [[given[root][r]] for r in ranks]
    if case.collective == "broadcast":
        return [given[root] for _ in ranks]
    everything = [blocks[0] for blocks in given]
    return [everything if case.collective != "gather" or r == root else [] for r in ranks]


# ---- One case on one rank ----


class RankCase:
    """The memory of one rank in one case: call it, then check every byte of it."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        taken, given = VECTORS[case.collective]
        self.has_input = case.collective != "scatter" or rank == case.root_rank
        self.has_output = case.collective not in ("reduce", "gather") or rank == case.root_rank
        self.in_place = case.place == "in" and self.has_input and self.has_output
        counts_in, counts_out = lengths(case, rank)
        self.source = self._make(taken, counts_in, case.source)
        self.target = self._make(given, counts_out, case.target)
        if self.in_place and given == "world":
            self.target.fill([rank], [inputs(case, rank)[0]])
        else:
            self.source.fill(range(len(counts_in)), inputs(case, rank))
        self.source.freeze()
        self.target.freeze()

    def _make(self, parts: str, counts: list[int], layout: str) -> Blocks:
        how: Layout = LAYOUTS[layout]
        stacked = parts == "world" and self.case.blocks == "array"
        shared = self.case.algorithm == "zero_copy"
        return Blocks(counts, dtype_of(self.case.dtype), how, stacked=stacked, shared=shared)

    def call(self, group: pycoll.Communicator) -> None:
        case = self.case
        taken, given = VECTORS[case.collective]
        source = self.source.blocks if taken == "world" else self.source.blocks[0]
        target = self.target.blocks if given == "world" else self.target.blocks[0]
        if self.in_place and taken == "world":
            target = self.source.blocks[self.rank]
        elif self.in_place and given == "world":
            source = self.target.blocks[self.rank]
        options: dict[str, Any] = {"algorithm": case.algorithm}
        if case.op != "none":
            options["op"] = case.op
        if case.op == "premul_sum":
            options["factor"] = factor(self.rank)
        if case.collective in ROOTED:
            options["root"] = case.root_rank
        if case.collective == "reduce":
            out = target if self.has_output and not self.in_place else None
            group.reduce(source, out=out, **options)
        elif case.collective in ("all_reduce", "broadcast"):
            self._call_on_one_vector(group, source, target, options)
        else:
            source = source if self.has_input else None
            target = target if self.has_output else None
            getattr(group, case.collective)(target, source, **options)

    def _call_on_one_vector(
        self, group: pycoll.Communicator, source: Array, target: Array, options: dict[str, Any]
    ) -> None:
        """The public methods are in place; torch's forms and the core can do both."""
        case = self.case
        if self.in_place:
            getattr(group, case.collective)(source, **options)
            return
        how = Call(
            case.collective,
            case.op,
            options.get("factor", 1.0),
            options.get("root", 0),
            case.algorithm,
            None,
        )
        group._run(how, [source], [target], None, False)

    def problems(self, expected: list[Array]) -> list[str]:
        """Where memory is not as it must be: results, inputs, gaps and guards, byte for byte."""
        given = VECTORS[self.case.collective][1]
        if self.in_place and given == "world":
            self.target.expect(range(len(expected)), expected)
        elif self.in_place and VECTORS[self.case.collective][0] == "world":
            self.source.expect([self.rank], expected)
        elif self.in_place:
            self.source.expect([0], expected)
        elif expected:
            self.target.expect(range(len(expected)), expected)
        found = self.source.problems("input") + self.target.problems("output")
        return [f"rank {self.rank}: {text}" for text in found]


def run_on_threads(ranks: ThreadRanks, case: Case) -> list[str]:
    """What is wrong after the case ran on all ranks."""
    made = [RankCase(case, rank) for rank in range(case.world_size)]
    try:
        ranks.run(lambda group: made[group.rank].call(group))
    except AssertionError as error:
        raise AssertionError(report(case, [str(error)])) from error
    expected = outputs(case)
    return [text for rank, one in enumerate(made) for text in one.problems(expected[rank])]


def rank_cases(group: pycoll.Communicator, cases: list[Case]) -> list[str]:
    """What is wrong on this rank, a process, after these cases."""
    failures = []
    for case in cases:
        one = RankCase(case, group.rank)
        try:
            one.call(group)
        except pycoll.Error as error:
            raise AssertionError(report(case, [repr(error)])) from error
        problems = one.problems(outputs(case)[group.rank])
        if problems:
            failures.append(report(case, problems))
    return failures


def report(case: Case, problems: list[str]) -> str:
    lines = [f'python tests/matrix_run.py "{case}"', *problems[:4]]
    return "\n    ".join(lines)


def main(text: str, split: str = "") -> int:
    case = Case.parse(text)
    if "," in case.transport:  # processes on two hosts
        import test_two_hosts

        problems = test_two_hosts.run_alone(case, split or "ab" * case.world_size)
    else:
        ranks = ThreadRanks(case.world_size, case.options)
        try:
            problems = run_on_threads(ranks, case)
        finally:
            ranks.close()
    print("\n".join(problems) or "as it should be")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
