"""Data for collectives, and what NumPy says the result must be.

References compute in float64 (integers: modulo 2^64; bools: by counting) and round once; where the
data are small integers the result must be equal, elsewhere within the bound that float32
accumulation allows.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pycoll import _core

Array = npt.NDArray[Any]

WORLD_SIZES = [1, 2, 3, 4, 5, 7]
ALGORITHMS = {c: [a.name for a in _core.algorithms(c)] for c in _core.collectives()}
REDUCIBLE = ["float32", "float64", "float16", "bfloat16", "int32", "int64"]
MOVABLE = [*REDUCIBLE, "bool", "int8", "uint8", "int16", "uint16", "uint32", "uint64"]
OPS = ["sum", "avg", "product", "min", "max"]
# Every pair of dtype and operation, PREMUL_SUM aside: it needs a factor.
REDUCTIONS = [
    (dtype, op)
    for dtype in _core.dtypes()
    for op in [*OPS, "band", "bor", "bxor"]
    if not _core.why_not_reducible(dtype, op)
]
# 64 float32 a message and 1024 a window: hundreds of elements cross many slice boundaries.
SMALL_SLICES = {"PYCOLL_SLOT_BYTES": 256, "PYCOLL_WINDOW_BYTES": 4096, "PYCOLL_FIFO_DEPTH": 2}
LARGEST = 1_000_000
GUARD_BYTES = 256
GUARD = 0xA5


# ---- Data and references ----


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@functools.cache
def table(rank: int, dtype: str, kind: str, size: int) -> Array:
    """Values of one rank, different at every position; `kind` says what a reduction needs."""
    rng = np.random.default_rng([rank, size, len(kind)])
    if kind == "wrap":
        return rng.integers(-(2**63), 2**63 - 1, size, np.int64).astype(dtype)
    if kind == "small":
        values = rng.integers(-60, 60, size)
    elif kind == "factors":
        values = rng.integers(1, 4, size) * rng.choice([-1, 1], size)
    else:
        values = rng.normal(size=size) * 10.0 ** rng.integers(-2, 2, size)
    target = dtype_of(dtype)
    if target.kind == "b":
        return rng.integers(0, 4, size) > 0
    if target.kind == "c":
        values = values + 1j * rng.integers(-60, 60, size)
    elif target.kind not in "iu":
        values = values.astype(np.float64)
    array: Array = values.astype(target)
    return array


def data(rank: int, dtype: str, op: str, n: int, kind: str | None = None) -> Array:
    if kind is None:
        kind = "factors" if op == "product" else "small"
        if "int" in dtype and op != "avg":
            kind = "wrap"
    size = 8192 if n <= 8192 else LARGEST
    return table(rank, dtype, kind, size)[:n]


def counted(parts: list[Array], op: str) -> Array:
    """Of bools: SUM is OR, AVG the truncated mean of ones and zeros."""
    trues, world_size = np.sum(parts, 0, np.int64), len(parts)
    if op == "bxor":
        return trues % 2 == 1
    return trues > 0 if op in ("sum", "max", "bor") else trues // world_size == 1


def exact(parts: list[Array], op: str) -> Array:
    """The reduction in float64, or in wrapping 64-bit integers, not yet rounded to the dtype."""
    kind = parts[0].dtype.kind
    if kind == "b":
        return counted(parts, op)
    if kind == "c":
        return exact([p.real for p in parts], op) + 1j * exact([p.imag for p in parts], op)
    wide = {"i": np.int64, "u": np.uint64}.get(kind, np.float64)
    stack = np.stack([part.astype(wide) for part in parts])
    if op == "avg":
        total = stack.sum(0)
        if kind in "iu":  # Toward zero.
            quotient = np.abs(total) // wide(len(parts))
            return quotient if kind == "u" else np.sign(total) * quotient
        return total / len(parts)
    function = {
        "sum": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    result: Array = function.reduce(stack, 0)
    return result


def reduced(parts: list[Array], op: str) -> Array:
    dtype = parts[0].dtype
    with np.errstate(over="ignore"):
        result = exact(parts, op)
        if dtype.name == "float8_e4m3fn":  # It saturates.
            result = np.clip(result, -448, 448)
        return result.astype(dtype)


class Guarded:
    """A copy of an array between guard bytes, at an address that is aligned to its items only."""

    def __init__(self, values: Array, shift: int = 0) -> None:
        size = values.itemsize
        begin = GUARD_BYTES + shift % 8 * size
        self.memory = np.full(begin + values.nbytes + GUARD_BYTES, GUARD, np.uint8)
        self.inside = slice(begin, begin + values.nbytes)
        self.array = self.memory[self.inside].view(values.dtype).reshape(values.shape)
        self.array[...] = values

    def intact(self) -> bool:
        outside = [self.memory[: self.inside.start], self.memory[self.inside.stop :]]
        return all((part == GUARD).all() for part in outside)


def check_ranks(results: list[Guarded], expected: Array, what: Any) -> None:
    for rank, result in enumerate(results):
        assert result.intact(), f"{what}: rank {rank} wrote outside its array"
        np.testing.assert_array_equal(result.array, expected, err_msg=f"{what}, rank {rank}")
        assert result.array.tobytes() == results[0].array.tobytes(), (what, rank)


def all_reduce_cases(communicator, algorithm, cases, kind=None):
    results = []
    for dtype, op, n in cases:
        guarded = Guarded(data(communicator.rank, dtype, op, n, kind), shift=n + communicator.rank)
        communicator.all_reduce(guarded.array, op, algorithm=algorithm)
        results.append(guarded)
    return results


def check_all_reduce(group, algorithm, cases):
    by_rank = group.run(all_reduce_cases, algorithm, cases)
    for i, (dtype, op, n) in enumerate(cases):
        parts = [data(rank, dtype, op, n) for rank in range(group.world_size)]
        check_ranks([results[i] for results in by_rank], reduced(parts, op), (algorithm, cases[i]))


def edge_sizes(world_size: int) -> list[int]:
    return sorted({0, 1, 2, world_size - 1, world_size, world_size + 1, 2 * world_size - 1, 1009})
