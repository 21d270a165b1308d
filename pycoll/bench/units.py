"""Sizes as people write them, and the statistics that benchmarks need."""

from __future__ import annotations

import math
from collections.abc import Sequence

KIB = 1024
UNITS = {"": 1, "K": KIB, "M": KIB**2, "G": KIB**3}


def parse_size(text: str) -> int:
    """Bytes from "4", "64K", "256M" or "1G" (powers of 1024, as in nccl-tests).

    Raises ValueError that says what a size looks like.
    """
    cleaned = text.strip().upper().removesuffix("B")
    unit = cleaned[-1:] if cleaned[-1:] in "KMG" else ""
    try:
        size = int(cleaned.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        raise ValueError(f"{text!r} is not a size: write 4, 64K, 256M or 1G") from None
    if size < 1:
        raise ValueError(f"{text!r} is not a size: it must be at least one byte")
    return size


def format_size(size: int) -> str:
    """The shortest exact form: 65536 is "64K", 65537 is "65537"."""
    for unit in "GMK":
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def sizes_between(first: int, last: int, factor: int) -> list[int]:
    """`first`, `first * factor`, ... up to `last`."""
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= factor
    return sizes


def quantile(values: Sequence[float], fraction: float) -> float:
    """Nearest rank: the smallest value that `fraction` of the values do not exceed.

    With few values a high quantile is simply the largest of them.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
