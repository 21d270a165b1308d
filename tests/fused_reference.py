"""What the fused kernels must give, to the byte: rules of csrc/kernels/fused.h in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernel_reference import STORAGE, Array, bits_of, from_float32, is_nan, to_float32

LANES, CHUNK = 256, 4096
CASTS = ["float32", "float16", "bfloat16"]
FLOATS = [*CASTS, "float64"]
# The NaN without sign and payload.
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}


def one_nan(x: Array, dtype: str) -> Array:
    bits = bits_of(x)
    nan = is_nan(bits, dtype)
    result: Array = np.where(nan, bits.dtype.type(NAN[dtype]), bits).view(x.dtype)
    return result


def wide(x: Array, dtype: str) -> Array:
    """Values in their arithmetic type."""
    return x if dtype in ("float32", "float64") else to_float32(bits_of(x), dtype)


def cast(x: Array, source: str, target: str, scale: float) -> Array:
    product = wide(x, source) * np.float32(scale)
    result = product if target == "float32" else from_float32(product, target)
    return one_nan(result.view(STORAGE[target]), target)


def multiplied(x: Array, dtype: str, factor: float) -> Array:
    if dtype == "float64":
        return one_nan(x * np.float64(factor), dtype)
    return cast(x, dtype, dtype, factor)


def from_float64(x: Array, dtype: str) -> Array:
    """Rounded to float32, and then to what is narrower."""
    if dtype in ("float32", "float64"):
        return x.astype(dtype)
    return from_float32(x.astype(np.float32), dtype).view(STORAGE[dtype])


def all_finite(x: Array, dtype: str) -> bool:
    return bool(np.isfinite(wide(x, dtype)).all())


def fold(lanes: Array) -> np.float64:
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return np.float64(lanes[0])


def sum_in_lanes(terms: Array) -> np.float64:
    rows = -(-len(terms) // LANES)
    padded = np.zeros(rows * LANES)
    padded[: len(terms)] = terms
    lanes = np.zeros(LANES)
    for row in padded.reshape(rows, LANES):
        lanes = lanes + row
    return fold(lanes)


def sum_of_squares(tensors: Sequence[tuple[Array, str]]) -> float:
    sums = [
        sum_in_lanes(wide(x, dtype)[at : at + CHUNK].astype(np.float64) ** 2)
        for x, dtype in tensors
        for at in range(0, len(x), CHUNK)
    ]
    return float(sum_in_lanes(np.array(sums, np.float64)))
