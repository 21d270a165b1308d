"""The matrix of collectives: covering sets of cases. matrix_run.py runs them.

A case is a point of FACTORS for one world size and transport. Its text names it completely.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, fields
from typing import Any

from layouts import LAYOUTS
from pycoll import _core
from reference import SMALL_SLICES, dtype_of

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
