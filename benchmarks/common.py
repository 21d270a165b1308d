"""What the scripts here take from pycoll.bench."""

from pycoll.bench.machine import machine, machine_lines
from pycoll.bench.units import (
    format_size,
    geometric_mean,
    parse_size,
    quantile,
    sizes_between,
)

__all__ = [
    "format_size",
    "geometric_mean",
    "machine",
    "machine_lines",
    "parse_size",
    "quantile",
    "sizes_between",
]
