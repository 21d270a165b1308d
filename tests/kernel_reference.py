"""What the elementwise kernels must give, to the byte, and the data to try them on.

The references share no formula with the kernels: float16 is NumPy's, bfloat16 is rounded by
looking at the remainder, 8-bit floats by a search among all their values, MIN and MAX compare in
float64, averages of integers are Python integers.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pycoll import _core

Array = npt.NDArray[Any]

# Storage type of each dtype. Bools may hold any byte; floats that NumPy lacks are held as bits.
STORAGE: dict[str, np.dtype] = {
    "bool": np.dtype(np.uint8),
    **{f"{u}int{bits}": np.dtype(f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}
INTEGERS = [name for name in STORAGE if "int" in name]
FLOATS = [name for name in STORAGE if "float" in name]
HALVES = ["float16", "bfloat16"]
FLOAT8S = ["float8_e4m3fn", "float8_e5m2"]
NARROW = [*HALVES, *FLOAT8S]
PARTS = {"complex64": "float32", "complex128": "float64"}
BITWISE = ["band", "bor", "bxor"]
OPS = ["sum", "avg", "product", "min", "max", *BITWISE, "premul_sum"]
PAIRS = [
    *((dtype, op) for dtype in ["bool", *INTEGERS] for op in OPS if op != "premul_sum"),
    *((dtype, op) for dtype in FLOATS for op in OPS if op not in BITWISE),
    *((dtype, op) for dtype in PARTS for op in ("sum", "avg", "premul_sum")),
]
ISAS: list[str] = _core.isas()
# What lies above is NaN.
INFINITY = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF << 52,
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7C,
}
QUIET_BIT = {"float16": 0x200, "bfloat16": 0x40, "float32": 1 << 22, "float64": 1 << 51}


# ---- References ----


def bits_of(x: Array) -> Array:
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def bits_dtype(dtype: str) -> np.dtype:
    return np.dtype(f"u{STORAGE[dtype].itemsize}")


def is_nan(bits: Array, dtype: str) -> Array:
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    nan: Array = (bits & bits.dtype.type(sign - 1)) > bits.dtype.type(INFINITY[dtype])
    return nan


def quiet(bits: Array, dtype: str) -> Array:
    quieted: Array = bits | bits.dtype.type(QUIET_BIT[dtype])
    return quieted


@functools.cache
def float8_values(dtype: str) -> Array:
    """Of all 256 codes, in float32; NaN quiet and without payload."""
    codes = np.arange(256, dtype=np.uint8)
    values = bits_of(codes.view(getattr(ml_dtypes, dtype)).astype(np.float32))
    sign = (codes & 0x80).astype(np.uint32) << 24
    result: Array = np.where(is_nan(codes, dtype), sign | 0x7FC00000, values).view(np.float32)
    return result


def nearest_float8(x: Array, dtype: str) -> Array:
    """float32 -> code of the nearest value, ties to even; NaN is the code of all ones.

    An infinity of float8_e5m2 stands where the next finite value would be.
    """
    grid = float8_values(dtype)[: INFINITY[dtype] + 1].astype(np.float64)
    if np.isinf(grid[-1]):
        grid[-1] = 2 * grid[-2] - grid[-3]
    middles = (grid[:-1] + grid[1:]) / 2
    magnitude = np.abs(x.astype(np.float64))
    code = np.searchsorted(middles, magnitude, side="left")
    tied = magnitude == np.append(middles, -1)[code]
    code = np.where(np.isnan(magnitude), 0x7F, code + (tied & (code % 2 == 1)))
    return (code | np.signbit(x) * 0x80).astype(np.uint8)


def to_float32(bits: Array, dtype: str) -> Array:
    """Bits of a narrow float -> float32; a float16 NaN moves its payload and becomes quiet."""
    if dtype in FLOAT8S:
        return float8_values(dtype)[bits]
    wide = bits.astype(np.uint32)
    if dtype == "bfloat16":
        return (wide << 16).view(np.float32)
    exact = bits_of(bits.view(np.float16).astype(np.float32))
    nan = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    return np.where(is_nan(bits, dtype), nan, exact).view(np.float32)


def from_float32(x: Array, dtype: str) -> Array:
    """float32 -> bits of the nearest narrow float, ties to even."""
    if dtype in FLOAT8S:
        return nearest_float8(x, dtype)
    wide = bits_of(x)
    if dtype == "bfloat16":
        down, remainder = wide >> 16, wide & 0xFFFF
        up = (remainder > 0x8000) | ((remainder == 0x8000) & (down & 1 == 1))
        rounded, nan = down + up, down | 0x40
    else:
        rounded = bits_of(x.astype(np.float16)).astype(np.uint32)
        nan = (wide >> 16) & 0x8000 | 0x7E00 | (wide >> 13) & 0x3FF
    return np.where(is_nan(wide, "float32"), nan, rounded).astype(np.uint16)


def to_acc(x: Array, dtype: str, acc: str) -> Array:
    """The same numbers in the type of partial results."""
    if dtype == acc:
        return x
    return x.astype(STORAGE[acc]) if dtype in INTEGERS else to_float32(bits_of(x), dtype)


def as_float64(x: Array, dtype: str) -> Array:
    return (to_float32(bits_of(x), dtype) if dtype in NARROW else x).astype(np.float64)


def select(a: Array, b: Array, dtype: str, op: str) -> Array:
    """MIN or MAX of two arrays: an operand unchanged, the first NaN, -0 below +0."""
    if dtype in INTEGERS:
        return np.minimum(a, b) if op == "min" else np.maximum(a, b)
    x, y = as_float64(a, dtype), as_float64(b, dtype)
    if op == "max":
        x, y = -x, -y
    less = (x < y) | ((x == y) & np.signbit(x))
    first = np.isnan(x) | (less & ~np.isnan(y))
    return np.where(first, bits_of(a), bits_of(b)).view(a.dtype)


def truth(a: Array, b: Array, op: str) -> Array:
    x, y = a != 0, b != 0
    either, both = x | y, x & y
    result = {"sum": either, "max": either, "bor": either, "bxor": x ^ y}.get(op, both)
    return result.astype(np.uint8)


def combine(a: Array, b: Array, acc: str, op: str) -> Array:
    """What reduce_local must give for operands that already are accumulators."""
    if acc == "bool":
        return truth(a, b, op)
    if acc in PARTS:
        part = PARTS[acc]
        return combine(a.view(part), b.view(part), part, op).view(a.dtype)
    if op in BITWISE:
        function = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}[op]
        return np.asarray(function(a, b))
    if op in ("min", "max"):
        return select(a, b, acc, op)
    return nan_rule(a, b, a * b if op == "product" else a + b, acc)


def nan_rule(a: Array, b: Array, result: Array, dtype: str) -> Array:
    """`result`, but the first NaN of the operands, quiet."""
    if dtype in INTEGERS:
        return result
    a_bits, b_bits = bits_of(a), bits_of(b)
    bits = np.where(is_nan(b_bits, dtype), quiet(b_bits, dtype), bits_of(result))
    return np.where(is_nan(a_bits, dtype), quiet(a_bits, dtype), bits).view(a.dtype)


def finish(acc: Array, dtype: str, op: str, world_size: int) -> Array:
    if dtype in PARTS:
        return finish(acc.view(PARTS[dtype]), PARTS[dtype], op, world_size).view(acc.dtype)
    if dtype in INTEGERS:
        quotients = [abs(x) // world_size * (1 if x > 0 else -1) for x in acc.tolist()]
        return np.array(quotients, acc.dtype).astype(STORAGE[dtype])
    x = acc / acc.dtype.type(world_size) if op == "avg" else acc
    return from_float32(x, dtype) if dtype in NARROW else x


def scale(x: Array, dtype: str, factor: float) -> Array:
    """Multiplied in float32, or float64, and rounded once."""
    if dtype in PARTS:
        return scale(x.view(PARTS[dtype]), PARTS[dtype], factor).view(x.dtype)
    acc = "float32" if dtype in NARROW else dtype
    wide = to_acc(x, dtype, acc)
    by = np.full(len(x), factor, wide.dtype)
    product = nan_rule(wide, by, wide * by, acc)
    return from_float32(product, dtype) if dtype in NARROW else product


# ---- Data ----


def sample(dtype: str, n: int, seed: int) -> Array:
    """n elements, half of them special: NaN of several payloads, infinities, zeros, extremes."""
    if dtype in PARTS:
        return sample(PARTS[dtype], 2 * n, seed).view(dtype)
    rng = np.random.default_rng([seed, n, STORAGE[dtype].itemsize])
    unsigned = bits_dtype(dtype)
    top = 1 << (8 * unsigned.itemsize - 1)
    bits = rng.integers(0, 2 * top - 1, n, dtype=unsigned, endpoint=True)
    if dtype in FLOAT8S:
        special = [0, 1, 7, 8, 0x7B, 0x7C, 0x7D, 0x7E, 0x7F]
    elif dtype in FLOATS:
        inf = INFINITY[dtype]
        special = [0, 1, inf, inf - 1, inf + 1, inf + 2, inf + QUIET_BIT[dtype] + 3, top - 1]
    else:
        special = [0, 1, top - 1]
    special += [top | x for x in special]
    chosen = np.array(special, dtype=unsigned)[rng.integers(0, len(special), n)]
    return np.where(rng.random(n) < 0.5, chosen, bits).view(STORAGE[dtype])


def in_buffer(data: bytes, offset: int) -> npt.NDArray[np.uint8]:
    """The bytes at `offset` past a 64-byte boundary."""
    room = np.zeros(len(data) + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    view = room[start : start + len(data)]
    view[:] = np.frombuffer(data, np.uint8)
    return view


def operand_forms(dtype: str, op: str) -> list[tuple[bool, bool]]:
    """Which operands are accumulators: one form is enough where the types are the same."""
    if _core.acc_dtype(dtype, op) == dtype:
        return [(False, False)]
    return [(False, False), (False, True), (True, False), (True, True)]
