"""The matrix of collectives: a covering set of cases, and one case run on one rank.

A case is a point of FACTORS for one world size and transport. Its text names it completely, so a
failure can be run alone:

    python tests/matrix.py "all_gather.ring world_size=5 transport=tcp dtype=int8 ..."
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

import pycoll
from helpers_threads import ThreadRanks
from layouts import LAYOUTS, Blocks, Layout
from pycoll import _core
from pycoll._calls import Call
from reference import SMALL_SLICES, Array, data, dtype_of, reduced

# What each rank gives and gets: "one" vector, a block for each rank of the "world", or nothing.
VECTORS = {
    "all_reduce": ("one", "one"),
    "broadcast": ("one", "one"),
    "reduce": ("one", "one"),
    "all_gather": ("one", "world"),
    "gather": ("one", "world"),
    "reduce_scatter": ("world", "one"),
    "scatter": ("world", "one"),
    "all_to_all": ("world", "world"),
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
UNEVEN = ("all_gather", "reduce_scatter", "all_to_all")  # lengths of blocks may differ
OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"]
LARGEST = 1_000_000
SLICES = {
    "default": {"PYCOLL_SLOT_BYTES": 1 << 17, "PYCOLL_WINDOW_BYTES": 1 << 19},
    "small": {**SMALL_SLICES, "PYCOLL_TCP_CONNECTIONS": 3},
}


def _has_numpy(name: str) -> bool:
    try:
        return bool(dtype_of(name).name == name)
    except TypeError:
        return False


DTYPES = [name for name in _core.dtypes() if _has_numpy(name)]
# Rows: collective.algorithm, and whether it needs memory that all ranks share.
NEEDS_WINDOW = {f"{c}.{a.name}": a.needs_window for c in VECTORS for a in _core.algorithms(c)}
NEEDS_WINDOW |= {f"{c}.auto": False for c in VECTORS}
# Numbers of elements: of the vector, or of a block.
SIZES = {
    "0": lambda w, slot, window: 0,
    "1": lambda w, slot, window: 1,
    "w-1": lambda w, slot, window: w - 1,
    "w": lambda w, slot, window: w,
    "w+1": lambda w, slot, window: w + 1,
    "1009": lambda w, slot, window: 1009,
    "slot-1": lambda w, slot, window: slot - 1,
    "slot": lambda w, slot, window: slot,
    "slot+1": lambda w, slot, window: slot + 1,
    "w*slot-1": lambda w, slot, window: w * slot - 1,
    "w*slot+1": lambda w, slot, window: w * slot + 1,
    "window-1": lambda w, slot, window: window - 1,
    "window+1": lambda w, slot, window: window + 1,
    "largest": lambda w, slot, window: LARGEST,
}
# `place`: the output is the input, or its own memory. `blocks`: one array, or one for each rank,
# of equal or uneven lengths.
FACTORS: dict[str, list[str]] = {
    "row": list(NEEDS_WINDOW),
    "dtype": DTYPES,
    "op": ["none", *OPS],
    "size": [name for name in SIZES if name != "largest"],
    "source": list(LAYOUTS),
    "target": list(LAYOUTS),
    "place": ["out", "in"],
    "blocks": ["array", "list", "uneven"],
    "root": ["first", "middle", "last"],
    "slices": list(SLICES),
}


# ---- Cases ----


@dataclass(frozen=True)
class Case:
    row: str  # collective.algorithm
    world_size: int
    transport: str
    dtype: str
    op: str
    size: str
    source: str
    target: str
    place: str
    blocks: str
    root: str
    slices: str

    @property
    def collective(self) -> str:
        return self.row.split(".")[0]

    @property
    def algorithm(self) -> str:
        return self.row.split(".")[1]

    @property
    def root_rank(self) -> int:
        return {"first": 0, "middle": self.world_size // 2, "last": self.world_size - 1}[self.root]

    @property
    def options(self) -> dict[str, str]:
        names = {**SLICES[self.slices], "PYCOLL_TRANSPORT": self.transport}
        return {name: str(value) for name, value in names.items()}

    def __str__(self) -> str:
        rest = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)[1:]]
        return " ".join([self.row, *rest])

    @classmethod
    def parse(cls, text: str) -> Case:
        row, *rest = text.split()
        values: dict[str, Any] = dict(pair.split("=") for pair in rest)
        return cls(row=row, **{**values, "world_size": int(values["world_size"])})


def valid(point: dict[str, str]) -> bool:
    """Whether values may stand together; factors may be missing."""
    collective = point.get("row", "").split(".")[0]
    op, dtype, place = point.get("op"), point.get("dtype"), point.get("place")
    if op not in (None, "none") and dtype and _core.why_not_reducible(dtype, op):
        return False
    if point.get("slices") == "default" and "window" in point.get("size", ""):
        return False
    if not collective:
        return True
    if op and (op == "none") == (collective in REDUCING):
        return False
    blocks = point.get("blocks")
    if blocks == "uneven" and collective not in UNEVEN:
        return False
    if blocks == "list" and "world" not in VECTORS[collective]:
        return False
    if place == "in" and collective == "all_to_all":
        return False
    if point.get("root", "first") != "first" and collective not in ROOTED:
        return False
    # One memory has one layout; ranks other than the root of gather and scatter have two.
    source, target = point.get("source"), point.get("target")
    two = place == "out" or collective in ("gather", "scatter")
    return two or place is None or source is None or target in (None, source)


@functools.cache
def pairwise(windows: bool, seed: int) -> list[dict[str, str]]:
    """Points that hold every pair of values of two factors which may stand together.

    Greedy: each begins with a pair that is missing, and takes for one factor after the other the
    value that brings the most missing pairs with those that it has.
    """
    rng = random.Random(seed)
    factors = dict(FACTORS)
    factors["row"] = [row for row, needs in NEEDS_WINDOW.items() if windows or not needs]
    items = [[(name, value) for value in values] for name, values in factors.items()]
    missing = {
        frozenset(pair)
        for one, other in itertools.combinations(items, 2)
        for pair in itertools.product(one, other)
        if valid(dict(pair))
    }

    def complete(point: dict[str, str], *, greedy: bool) -> dict[str, str] | None:
        for values in items:
            if values[0][0] in point:
                continue
            choices = [item for item in values if valid(point | dict([item]))]
            if not choices:
                return None
            rng.shuffle(choices)

            gains = [
                sum(frozenset((item, other)) in missing for other in point.items())
                for item in choices
            ]
            best = choices[gains.index(max(gains))] if greedy else choices[0]
            point = point | dict([best])
        return point

    points = []
    for pair in sorted(missing, key=sorted):
        if pair not in missing:
            continue
        # A greedy choice may lead into a corner, and some pairs stand in no point at all.
        tries = (complete(dict(pair), greedy=i == 0) for i in range(50))
        point = next((point for point in tries if point), None)
        if point is not None:
            missing -= set(map(frozenset, itertools.combinations(point.items(), 2)))
            points.append(point)
    return points


def every_value(points: list[dict[str, str]]) -> list[dict[str, str]]:
    """A few of `points` that hold every value of every factor (greedy)."""
    missing = {item for p in points for item in p.items() if item[0] not in ("size", "slices")}
    chosen = []
    while missing:
        best = max(points, key=lambda point: len(missing & set(point.items())))
        missing -= set(best.items())
        chosen.append(best)
    return chosen


def covering(transport: str, world_size: int) -> list[Case]:
    """A pairwise covering set; that of the largest size, which costs most, is no larger than it
    must be: every value once with it is every pair. (In small slices it would take minutes.)
    """
    points = pairwise(transport == "shm", world_size)
    few = every_value(points)
    points = points + [{**point, "size": "largest", "slices": "default"} for point in few]
    return [_case(point, transport, world_size) for point in points]


def seeded_part(cases: list[Case], of: int) -> list[Case]:
    """One in `of` cases, at least one, the same in every run."""
    return random.Random(len(cases)).sample(cases, -(-len(cases) // of))


def sampled(transport: str, world_size: int, count: int, seed: int) -> list[Case]:
    """Random points, the same in every run."""
    rng = random.Random(f"{transport} {world_size} {seed}")
    cases: list[Case] = []
    while len(cases) < count:
        point = {name: rng.choice(values) for name, values in FACTORS.items()}
        if valid(point) and (transport == "shm" or not NEEDS_WINDOW[point["row"]]):
            cases.append(_case(point, transport, world_size))
    return cases


def _case(point: dict[str, str], transport: str, world_size: int) -> Case:
    return Case(**point, transport=transport, world_size=world_size)


# ---- Data ----


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


def inputs(case: Case, rank: int) -> list[Array]:
    """Different values on every rank and at every position; the period of large ones is prime, so
    that no slice is a copy of another."""
    counts, _ = lengths(case, rank)
    total, op = sum(counts), "sum" if case.op in ("none", "premul_sum") else case.op
    kind = "small" if case.op == "premul_sum" else None
    values = data(rank, case.dtype, op, min(total, 8191), kind)
    values = values if total <= 8191 else np.resize(values, total)
    return np.split(values, np.cumsum(counts)[:-1])


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
        totals = [reduction(case, list(parts)) for parts in zip(*given, strict=True)]
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
        return Blocks(counts, dtype_of(self.case.dtype), how, stacked=stacked)

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
        group._run(how, [source], [target], False)

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
    lines = [f'python tests/matrix.py "{case}"', *problems[:4]]
    return "\n    ".join(lines)


def main(text: str) -> int:
    case = Case.parse(text)
    ranks = ThreadRanks(case.world_size, case.options)
    try:
        problems = run_on_threads(ranks, case)
    finally:
        ranks.close()
    print("\n".join(problems) or "as it should be")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
